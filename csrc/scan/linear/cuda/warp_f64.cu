// The dense linear_scan for H <= 32 in one dtype; a file each, so that they compile side by side.
#include "scan/linear/cuda/warp.cuh"

namespace weft::scan {

template void run_linear_scan_warp<double>(const LinearScan&, const WarpPlan&, void*, cudaStream_t);

}  // namespace weft::scan
