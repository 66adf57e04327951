// Gates from what enters their nonlinearities, where torch's kernel ran the forward pass and kept none.
//
// In place, a thread per unit of one step and sequence: bound by the bytes of the gates, read and written once.
#include "common/launch.cuh"
#include "common/math.jit.cuh"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {
namespace {

constexpr int kThreads = 256;

template <Cell cell, typename scalar>
__global__ void __launch_bounds__(kThreads) gates_kernel(int64_t count, int H, scalar* gates, scalar* entering) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  scalar* const g = gates + at / H * 4 * H + at % H;
  if constexpr (cell == Cell::kGru) {
    const scalar r = sigmoid(g[0]), z = sigmoid(g[H]), n = hyperbolic_tangent(g[2 * H] + r * g[3 * H]);
    g[0] = r, g[H] = z, g[2 * H] = n;
  } else {
    const scalar i = sigmoid(g[0]), f = sigmoid(g[H]), c = hyperbolic_tangent(g[2 * H]), o = sigmoid(g[3 * H]);
    g[0] = i, g[H] = f, g[2 * H] = c, g[3 * H] = o;
    entering[at] = i * c;
  }
}

template <typename scalar>
void gates(const ScanShape& shape, scalar* gates, scalar* entering, cudaStream_t stream) {
  const int64_t count = shape.T * shape.B * shape.H, blocks = (count + kThreads - 1) / kThreads;
  if (shape.cell == Cell::kGru) {
    launch("rnn_scan_gates", gates_kernel<Cell::kGru, scalar>, blocks, dim3(kThreads), 0, stream, count, shape.H, gates,
           entering);
  } else {
    launch("rnn_scan_gates", gates_kernel<Cell::kLstm, scalar>, blocks, dim3(kThreads), 0, stream, count, shape.H,
           gates, entering);
  }
}

}  // namespace

void scan_gates(const ScanShape& shape, float* values, float* entering, cudaStream_t stream) {
  gates(shape, values, entering, stream);
}

void scan_gates(const ScanShape& shape, double* values, double* entering, cudaStream_t stream) {
  gates(shape, values, entering, stream);
}

}  // namespace weft::rnn
