// The diagonal scan of a slice, with what its rank tells of it.
#pragma once
#include <cuda_runtime_api.h>

#include "scan/linear/linear_scan_args.h"

namespace weft::scan {

// linear_scan_diagonal (linear_scan.h) in float or double, and the slice's message (slices/slice_args.h), in which A of
// the first step counts, also without x0. False, and nothing done, where no lane comes by all steps of a channel.
bool linear_scan_diagonal_told(const LinearScan& scan, void* message, cudaStream_t stream);

}  // namespace weft::scan
