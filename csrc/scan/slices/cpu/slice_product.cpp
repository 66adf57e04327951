// slice_product on the CPU: threads over batch rows and, where those are few, pieces of time.
#include "scan/slices/slice_product.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "common/integers.h"
#include "scan/slices/cpu/slice_product_kernels.h"

namespace weft::scan {
namespace {

// Steps of a piece, at least: each may stop at a product of zero for itself, and all are multiplied.
constexpr int64_t kProductPiece = 512;

void product_cpu(const DenseProduct& p, const at::Tensor& out) {
  const SliceProductKernels& kernels = cpu::slice_product_kernels();
  const int64_t H = p.H, numbers = 3 * product_numbers(H);
  const int64_t idle = at::in_parallel_region() ? 1 : at::get_num_threads() / p.B;
  const int64_t pieces = std::clamp<int64_t>(p.T / kProductPiece, 1, std::max<int64_t>(idle, 1));
  const int64_t steps = ceil_div(p.T, pieces);
  const std::unique_ptr<double[]> memory(new double[p.B * pieces * numbers + 8]);
  double* const matrices = reinterpret_cast<double*>((reinterpret_cast<uintptr_t>(memory.get()) | 63) + 1);
  std::vector<int64_t> exponents(p.B * pieces * 2 * H);
  at::parallel_for(0, p.B * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = std::min(p.T, i % pieces * steps);
      kernels.steps[p.wide](p, i / pieces, first, std::min(p.T, first + steps), matrices + i * numbers,
                            exponents.data() + i * 2 * H);
    }
  });
  for (int64_t row = 0; row < p.B; ++row) {
    double* const matrix = matrices + row * pieces * numbers;
    int64_t* const e = exponents.data() + row * pieces * 2 * H;
    for (int64_t i = 1; i < pieces; ++i) kernels.then(H, matrix + i * numbers, e + i * 2 * H, matrix, e);
    for (int64_t i = 0; i < H; ++i) {
      for (int64_t j = 0; j < H; ++j) {
        const Scaled number{matrix[i * product_row(H) + j], e[j]};
        const int64_t at = (row * H + i) * H + j;
        if (p.wide) {
          out.data_ptr<int64_t>()[at] = pack_product<double>(number);
        } else {
          out.data_ptr<int32_t>()[at] = pack_product<float>(number);
        }
      }
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("slice_product", [](const at::Tensor& A, bool reverse, bool transpose) {
    return slice_product(product_cpu, A, reverse, transpose);
  });
}

}  // namespace weft::scan
