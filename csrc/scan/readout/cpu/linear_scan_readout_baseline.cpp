// linear_scan_readout's CPU kernels for what every processor of the architecture has.
#include "scan/readout/cpu/linear_scan_readout_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/baseline-begin-inl.h"

#include "scan/readout/cpu/linear_scan_readout_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
