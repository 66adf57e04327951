// linear_scan_readout's CPU kernels for x86-64 with AVX2 and FMA.
#ifdef __x86_64__
#include "scan/readout/cpu/linear_scan_readout_kernels.h"

// After the other headers, and in this order.
#include "common/cpu/avx2-begin-inl.h"

#include "scan/readout/cpu/linear_scan_readout_kernels-inl.h"

#include "common/cpu/simd-end-inl.h"
#endif
