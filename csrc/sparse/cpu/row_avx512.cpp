// The sparse room's CPU kernels over rows for x86-64 with AVX-512.
#ifdef __x86_64__
#include "sparse/cpu/row_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/avx512-begin-inl.h"

#include "sparse/cpu/row_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
