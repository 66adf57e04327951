// Gates from what enters their nonlinearities, where torch's kernel ran the forward pass and kept none.
//
// In place, a thread per unit of one step and sequence: bound by the bytes of the gates, read and written once.
#include "common/launch.cuh"
#include "rnn/cells/cells.h"
#include "rnn/cells/device_math.jit.cuh"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {
namespace {

constexpr int kThreads = 256;

template <Cell cell, typename scalar>
__global__ void __launch_bounds__(kThreads) gates_kernel(int64_t count, int H, scalar* gates, scalar* entering) {
  using Tr = Traits<cell>;
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  scalar* const g = gates + at / H * Tr::kSaved * H + at % H;
  scalar pre[Tr::kGates], kept[Tr::kSaved], apart = 0;
#pragma unroll
  for (int i = 0; i < Tr::kGates; ++i) pre[i] = g[i * H];
  if constexpr (Tr::kApart >= 0) {
    apart = pre[Tr::kApart];
    pre[Tr::kApart] = g[(Tr::kSaved - 1) * H];
  }
  Tr::template gates<DeviceMath<scalar>>(pre, apart, kept);
#pragma unroll
  for (int i = 0; i < Tr::kGates; ++i) g[i * H] = kept[i];
  if constexpr (has_c(cell)) entering[at] = Tr::into_c(kept);
}

template <typename scalar>
void gates(const ScanShape& shape, scalar* gates, scalar* entering, cudaStream_t stream) {
  const int64_t count = shape.T * shape.B * shape.H, blocks = (count + kThreads - 1) / kThreads;
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (has_gates(cell) && scan_max_hidden(cell) > 0) {
      launch("rnn_scan_gates", gates_kernel<cell, scalar>, blocks, dim3(kThreads), 0, stream, count, shape.H, gates,
             entering);
    }
  });
}

}  // namespace

void scan_gates(const ScanShape& shape, float* values, float* entering, cudaStream_t stream) {
  gates(shape, values, entering, stream);
}

void scan_gates(const ScanShape& shape, double* values, double* entering, cudaStream_t stream) {
  gates(shape, values, entering, stream);
}

}  // namespace weft::rnn
