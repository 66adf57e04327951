// linear_scan on the CPU: threads over batch, channels and, where those are few, time; linear_scan_kernels.h has the
// rest.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "common/integers.h"
#include "scan/linear/cpu/linear_scan_kernels.h"
#include "scan/linear/linear_scan.h"

namespace weft::scan {
namespace {

// Below this many operations a thread costs more than it saves.
constexpr int64_t kOperationsPerThread = 1 << 15;
// Channels per thread: whole cache lines, so that no two threads write to one.
constexpr int64_t kLine = 64;
// Steps of a chunk, at least, and chunks, at most. The problem alone decides how T is cut, not the number of threads.
constexpr int64_t kChunk = 2048, kMaxChunks = 64;

void scan_dense(const LinearScan& s) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  const int type = int(s.dtype);
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * s.H * s.H));
  at::parallel_for(0, s.B, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[kernels.scratch_bytes[type](s, end - begin)]);
    kernels.dense[type](s, begin, end, scratch.get());
  });
}

// `part`, a chunk of steps of all channels, and the state before it (see LinearScanKernels).
using RunPart = std::function<void(const Part& part, int64_t chunk, void* state)>;

void in_one_chunk(const LinearScan& s, const RunPart& run) {
  const int64_t lines = ceil_div(s.H, kLine);
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * std::min(kLine, s.H)));
  at::parallel_for(0, s.B * lines, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / lines, first = begin % lines, count = std::min(end - begin, lines - first);
      run({row, first * kLine, std::min(s.H, (first + count) * kLine), 0, s.T}, 0, nullptr);
      begin += count;
    }
  });
}

// The state that follows x after so many steps, false where the totals cannot say: a float's rounding must outweigh
// what fp64 has lost on the way.
bool apply(const Totals& totals, int64_t at, int64_t steps, float& x) {
  const double total = totals.product[at] * x + totals.offset[at];
  const double terms = totals.product_bound[at] * std::fabs(double(x)) + totals.offset_bound[at];
  const double lost = double(steps + 2) * 0x1p-27;                                // 26 of 53 digits
  const bool digits_left = terms * lost <= std::max(std::fabs(total), 0x1p-126);  // not with a NaN
  const float next = float(total);
  // Once a channel is not finite it stays so, and nothing is left to save.
  if (!(digits_left && std::isfinite(next)) && std::isfinite(x)) return false;
  x = next;
  return true;
}

void in_chunks(const LinearScan& s, int64_t chunk, int64_t chunks, const RunPart& run) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  const int type = int(s.dtype);
  const int64_t channels = s.B * s.H;
  const std::unique_ptr<double[]> numbers(new double[4 * (chunks - 1) * channels]);
  const std::unique_ptr<float[]> starts(new float[chunks * channels]);
  auto totals = [&](int64_t k) {
    double* const at = numbers.get() + 4 * k * channels;
    return Totals{at, at + channels, at + 2 * channels, at + 3 * channels};
  };
  auto for_all = [&](int64_t count, auto&& function) {
    at::parallel_for(0, count * s.B, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t k = i / s.B;
        function(Part{i % s.B, 0, s.H, k * chunk, std::min(s.T, (k + 1) * chunk)}, k);
      }
    });
  };
  for_all(chunks - 1, [&](const Part& part, int64_t k) { kernels.totals[type](s, part, totals(k)); });
  LinearScan silent = s;
  silent.out = nullptr;
  for (int64_t row = 0; row < s.B; ++row) {
    kernels.diagonal[type](silent, {row, 0, s.H, 0, 0}, starts.get() + row * s.H);
  }
  at::parallel_for(0, channels, kLine, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t row = at / s.H, h = at % s.H;
      for (int64_t k = 0; k < chunks - 1; ++k) {
        float x = starts[k * channels + at];
        if (!apply(totals(k), at, chunk, x)) {
          kernels.diagonal[type](silent, {row, h, h + 1, k * chunk, (k + 1) * chunk}, &x);
        }
        starts[(k + 1) * channels + at] = x;
      }
    }
  });
  for_all(chunks, [&](const Part& part, int64_t k) { run(part, k, starts.get() + k * channels + part.row * s.H); });
}

// 1, or how many chunks T is cut into where rows and channels leave half of the threads idle. `chunk`: their steps.
int64_t chunks_of(const LinearScan& s, int64_t& chunk) {
  const int64_t parts = s.B * ceil_div(s.H, kLine);
  chunk = std::max(kChunk, ceil_div(s.T, kMaxChunks));
  const bool idle = 2 * parts <= at::get_num_threads() && !at::in_parallel_region();
  return idle && int(s.dtype) < kChunkedTypes ? ceil_div(s.T, chunk) : 1;
}

void scan_diagonal(LinearScan s) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  // Batch rows that lie end to end are one long row.
  if (s.A_b == s.H && s.b_b == s.H && s.out_b == s.H && (!s.x0 || s.x0_b == s.H)) {
    s.H *= s.B;
    s.B = 1;
  }
  const RunPart run = [&](const Part& part, int64_t, void* state) { kernels.diagonal[int(s.dtype)](s, part, state); };
  int64_t chunk;
  const int64_t chunks = chunks_of(s, chunk);
  chunks == 1 ? in_one_chunk(s, run) : in_chunks(s, chunk, chunks, run);
}

void linear_scan_cpu(const Problem& problem, const at::Tensor& out) {
  const Described d = describe(problem, out);
  if (d.problem.diagonal) {
    scan_diagonal(d.args);
  } else {
    scan_dense(d.args);
  }
}

void gradients_cpu(const DiagonalBackward& problem) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  const DescribedGradients d = describe(problem);
  DiagonalGradients g = d.args;
  LinearScan& s = g.scan;
  const int64_t H = s.H;
  if (s.A_b == H && s.b_b == H && (!s.out || s.out_b == H) && (!g.x0 || g.x0_b == H) &&
      (!g.grad_A || (g.x_b == H && (g.summed || g.grad_A_b == H)))) {
    s.H *= s.B;
    s.B = 1;
  }
  int64_t chunk;
  const int64_t chunks = chunks_of(s, chunk), channels = s.B * s.H;
  at::Tensor sums;
  double* parts = nullptr;
  if (g.grad_A && g.summed) {
    const auto type = d.problem.grad.is_complex() ? at::kComplexDouble : at::kDouble;
    sums = at::empty({chunks, d.problem.grad.size(1), H}, d.problem.grad.options().dtype(type));
    parts = static_cast<double*>(sums.mutable_data_ptr());
  }
  const RunPart run = [&](const Part& part, int64_t k, void* state) {
    kernels.gradients[int(s.dtype)](g, part, state, parts ? parts + k * channels : nullptr);
  };
  chunks == 1 ? in_one_chunk(s, run) : in_chunks(s, chunk, chunks, run);
  if (parts) d.problem.grad_A.copy_(at::sum(sums, 0));
}

at::Tensor forward_cpu(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool reverse,
                       bool transpose, bool batch_first) {
  return linear_scan_forward(linear_scan_cpu, A, b, x0, reverse, transpose, batch_first);
}

Gradients backward_cpu(const at::Tensor& grad, const at::Tensor& A, const std::optional<at::Tensor>& x,
                       const std::optional<at::Tensor>& x0, bool reverse, bool transpose,
                       std::array<bool, 3> output_mask, bool batch_first) {
  return linear_scan_gradients(linear_scan_cpu, gradients_cpu, grad, A, x, x0, reverse, transpose, output_mask,
                               batch_first);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("linear_scan", forward_cpu);
  m.impl("linear_scan_backward", backward_cpu);
}

}  // namespace weft::scan
