// linear_scan's CPU kernels for what every processor of the architecture has.
#include "scan/linear/cpu/linear_scan_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "scan/linear/cpu/linear_scan_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
