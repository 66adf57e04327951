// linear_scan_readout on the CPU: threads over rows and channels.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "common/integers.h"
#include "scan/readout/cpu/linear_scan_readout_kernels.h"
#include "scan/readout/linear_scan_readout.h"

namespace weft::scan::read_out {
namespace {

// Below this many operations a thread costs more than it saves.
constexpr int64_t kOperationsPerThread = 1 << 15;

template <typename Problem, typename Kernel>
void over_channels(const ReadOut& s, const Problem& problem, Kernel kernel) {
  const int64_t blocks = ceil_div(s.H, kReadOutBlock);
  const int64_t work = std::max<int64_t>(1, s.T * s.N * std::min(s.H, kReadOutBlock));
  const int64_t bytes = cpu::linear_scan_readout_kernels().scratch_bytes[int(s.dtype)](s);
  at::parallel_for(0, s.B * blocks, std::max<int64_t>(1, kOperationsPerThread / work), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[bytes]);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * kReadOutBlock;
      kernel(problem, i / blocks, first, std::min(s.H, first + kReadOutBlock), scratch.get());
    }
  });
}

void run(const ReadOut& problem, const at::Tensor&) {
  over_channels(problem, problem, cpu::linear_scan_readout_kernels().forward[int(problem.dtype)]);
}
void run_gradients(const ReadOutGradients& problem, const at::Tensor&) {
  over_channels(problem.scan, problem, cpu::linear_scan_readout_kernels().gradients[int(problem.scan.dtype)]);
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                                               const std::optional<at::Tensor>& x0, bool reverse, bool batch_first,
                                               bool save) {
  return readout_forward(run, A, b, c, x0, reverse, batch_first, save);
}

ReadOutGradientsOf backward_cpu(const at::Tensor& grad, const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                                const std::optional<at::Tensor>& x0, const at::Tensor& starts, bool reverse,
                                bool batch_first, std::array<bool, 4> output_mask) {
  return readout_gradients(run_gradients, grad, A, b, c, x0, starts, reverse, batch_first, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("linear_scan_readout", forward_cpu);
  m.impl("linear_scan_readout_backward", backward_cpu);
}

}  // namespace weft::scan::read_out
