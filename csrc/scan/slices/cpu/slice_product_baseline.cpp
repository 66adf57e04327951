// slice_product's CPU kernels for what every processor of the architecture has.
#include "scan/slices/cpu/slice_product_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "scan/slices/cpu/slice_product_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
