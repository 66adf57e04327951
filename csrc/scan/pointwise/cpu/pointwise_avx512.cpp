// The kernels of scan/pointwise/cpu/pointwise_kernels.h for x86-64 with AVX-512.
#ifdef __x86_64__
#include "scan/pointwise/cpu/pointwise_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/avx512-begin-inl.h"

#include "scan/pointwise/cpu/pointwise_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
