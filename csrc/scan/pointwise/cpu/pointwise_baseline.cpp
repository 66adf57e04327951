// The kernels of scan/pointwise/cpu/pointwise_kernels.h for what every processor of the architecture has.
#include "scan/pointwise/cpu/pointwise_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "scan/pointwise/cpu/pointwise_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
