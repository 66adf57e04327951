// The sparse room's CPU kernels over rows for what every processor of the architecture has.
#include "sparse/cpu/row_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "sparse/cpu/row_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
