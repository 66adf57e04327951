// zvc_compress's CPU kernels for x86-64 with AVX2.
#ifdef __x86_64__
#include "offload/cpu/zvc_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/avx2-begin-inl.h"

#include "offload/cpu/zvc_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
