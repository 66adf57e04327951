// slice_product's CPU kernels for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include "scan/slices/cpu/slice_product_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/avx2-begin-inl.h"

#include "scan/slices/cpu/slice_product_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
