// rle_compress and rle_decompress on CUDA: runs beside zvc_compress's kernels, allocation and registration.
#include "offload/rle_compress.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/integers.h"
#include "common/tensor.h"
#include "offload/cuda/rle_compress.h"
#include "offload/cuda/zvc_tensors.h"

namespace weft::offload {
namespace {

at::Tensor empty_mask(const at::Tensor& like, int64_t n) {
  return at::empty({ceil_div(n, 32)}, like.options().dtype(at::kInt));
}

Compressed rle_compress_cuda(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  const at::Tensor x = check_compressible("rle_compress", tensor);
  const int64_t n = x.numel();
  const at::Tensor mask = empty_mask(x, n);
  at::Tensor runs = at::empty({n + 1}, x.options().dtype(at::kInt)), values = at::empty({n}, x.options());
  at::Tensor size = at::empty({2}, x.options().dtype(at::kLong));
  auto* const sizes = size.mutable_data_ptr<int64_t>();
  zvc_compress_into(x, mask, values, sizes + 1);
  const RleRuns args{static_cast<const uint32_t*>(mask.const_data_ptr()), n, runs.mutable_data_ptr<int32_t>(), sizes};
  const at::Tensor memory = workspace(x, rle_runs_workspace(args));
  rle_runs(args, memory.mutable_data_ptr(), at::cuda::getCurrentCUDAStream());
  return {runs, values, size};
}

at::Tensor rle_decompress_cuda(const at::Tensor& runs, const at::Tensor& values, at::IntArrayRef shape) {
  const int64_t n = check_rle("rle_decompress", runs, values, shape);
  const c10::cuda::CUDAGuard guard(values.device());
  const at::Tensor lengths = runs.contiguous(), mask = empty_mask(values, n);
  const RleMask args{pointer<int32_t>(lengths), lengths.numel(), static_cast<uint32_t*>(mask.mutable_data_ptr()), n};
  const at::Tensor memory = workspace(values, rle_mask_workspace(args));
  rle_mask(args, memory.mutable_data_ptr(), at::cuda::getCurrentCUDAStream());
  at::Tensor out = at::empty(shape, values.options());
  zvc_decompress_into(mask, values.contiguous(), out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("rle_compress", rle_compress_cuda);
  m.impl("rle_decompress", rle_decompress_cuda);
}

}  // namespace weft::offload
