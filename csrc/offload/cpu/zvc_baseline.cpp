// zvc_compress's CPU kernels for what every processor of the architecture has.
#include "offload/cpu/zvc_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "offload/cpu/zvc_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
