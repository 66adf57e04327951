#include "scan/linear/cuda/block.cuh"

namespace weft::scan::block {

void run_bf16(const Arguments& p, bool transposed, cudaStream_t stream) {
  launch_all<__nv_bfloat16>(p, transposed, stream);
}

}  // namespace weft::scan::block
