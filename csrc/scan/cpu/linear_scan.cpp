// linear_scan on the CPU: threads over batch and channels; linear_scan_kernels.h has the rest.
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "common/integers.h"
#include "scan/cpu/linear_scan_kernels.h"
#include "scan/linear_scan.h"

namespace weft::scan {
namespace {

// Below this many operations a thread costs more than it saves.
constexpr int64_t kOperationsPerThread = 1 << 15;

void scan_dense(const LinearScan& s) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  const int type = int(s.dtype);
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * s.H * s.H));
  at::parallel_for(0, s.B, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> scratch(new char[kernels.scratch_bytes[type](s, end - begin)]);
    kernels.dense[type](s, begin, end, scratch.get());
  });
}

void scan_diagonal(LinearScan s) {
  const LinearScanKernels& kernels = cpu::linear_scan_kernels();
  // Batch rows that lie end to end are one long row.
  if (s.A_b == s.H && s.b_b == s.H && s.out_b == s.H && (!s.x0 || s.x0_b == s.H)) {
    s.H *= s.B;
    s.B = 1;
  }
  // Whole cache lines of channels, so that no two threads write to one.
  constexpr int64_t kLine = 64;
  const int64_t lines = ceil_div(s.H, kLine);
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * std::min(kLine, s.H)));
  at::parallel_for(0, s.B * lines, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / lines, first = begin % lines, count = std::min(end - begin, lines - first);
      kernels.diagonal[int(s.dtype)](s, row, first * kLine, std::min(s.H, (first + count) * kLine));
      begin += count;
    }
  });
}

}  // namespace

void linear_scan_cpu(const Problem& problem, const at::Tensor& out) {
  const Described d = describe(problem, out);
  if (d.problem.diagonal) {
    scan_diagonal(d.args);
  } else {
    scan_dense(d.args);
  }
}

}  // namespace weft::scan
