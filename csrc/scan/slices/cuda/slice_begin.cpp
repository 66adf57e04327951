// slice_begin on CUDA, in one walk where the scan is one.
#include "scan/slices/slice_begin.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/linear/cuda/diagonal_told.h"

namespace weft::scan {
namespace {

bool scan_told(const Problem& problem, const at::Tensor& out, const at::Tensor& message) {
  const Described d = describe(problem, out);
  return linear_scan_diagonal_told(d.args, message.data_ptr(), at::cuda::getCurrentCUDAStream());
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("slice_begin",
         [](const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool first, bool reverse) {
           const c10::cuda::OptionalCUDAGuard guard(b.device());
           return slice_begin(scan_told, A, b, x0, first, reverse);
         });
}

}  // namespace weft::scan
