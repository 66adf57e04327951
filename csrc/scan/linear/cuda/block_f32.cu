#include "scan/linear/cuda/block.cuh"

namespace weft::scan::block {

void run_f32(const Arguments& p, bool transposed, cudaStream_t stream) {
  launch_all<float>(p, transposed, stream);
}

}  // namespace weft::scan::block
