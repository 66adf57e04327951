// slice_product on CUDA: workspace and registration.
#include "scan/slices/slice_product.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/slices/cuda/product_kernels.h"

namespace weft::scan {
namespace {

void product_cuda(const DenseProduct& p, const at::Tensor& out) {
  TORCH_CHECK_TYPE(!p.wide, "slice_product: A must be float32 on CUDA, got float64");
  TORCH_CHECK_VALUE(p.H <= kProductMaxH, "slice_product: H must be at most ", kProductMaxH, " on CUDA, got ", p.H);
  at::Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = at::empty({int64_t(bytes)}, out.options().dtype(at::kByte));
    return workspace.data_ptr();
  };
  slice_product_cuda(p, out.data_ptr<int32_t>(), allocate, at::cuda::getCurrentCUDAStream());
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("slice_product", [](const at::Tensor& A, bool reverse, bool transpose) {
    const c10::cuda::OptionalCUDAGuard guard(A.device());
    return slice_product(product_cuda, A, reverse, transpose);
  });
}

}  // namespace weft::scan
