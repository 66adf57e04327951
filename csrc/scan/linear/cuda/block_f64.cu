#include "scan/linear/cuda/block.cuh"

namespace weft::scan::block {

void run_f64(const Arguments& p, bool transposed, cudaStream_t stream) {
  launch_all<double>(p, transposed, stream);
}

}  // namespace weft::scan::block
