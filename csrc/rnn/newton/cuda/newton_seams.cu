#include "rnn/newton/cuda/newton_seams.cuh"

#include "common/launch.cuh"

namespace weft::rnn {
namespace {

__global__ void __launch_bounds__(kSeamThreads) seams_kernel(NewtonSeams<float> a) {
  if (a.gate && *a.gate == 0) return;
  const int64_t index = (int64_t(blockIdx.x) * kSeamThreads + threadIdx.x) / 32;
  if (index < (a.chunks.count - 1) * a.B) mend_seam(a, index, threadIdx.x % 32);
}

}  // namespace

void newton_seams(const NewtonSeams<float>& args, cudaStream_t stream) {
  const int64_t warps = (args.chunks.count - 1) * args.B;
  launch("rnn_newton_seams", seams_kernel, ceil_div(warps, kSeamThreads / 32), dim3(kSeamThreads), 0, stream, args);
}

}  // namespace weft::rnn
