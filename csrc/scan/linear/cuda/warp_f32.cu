// The dense linear_scan for H <= 32 in one dtype; a file each, so that they compile side by side. Slices are of this
// one.
#include "scan/linear/cuda/warp_slice.cuh"

namespace weft::scan {

template void run_linear_scan_warp<float>(const LinearScan&, const WarpPlan&, void*, cudaStream_t);

}  // namespace weft::scan
