// zvc_compress and zvc_decompress on CUDA: allocation and registration.
#include "offload/cuda/zvc_compress.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "offload/cuda/zvc_tensors.h"
#include "offload/zvc_compress.h"

namespace weft::offload {

at::Tensor workspace(const at::Tensor& like, size_t bytes) {
  return at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
}

void zvc_compress_into(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& values, int64_t* size) {
  const ZvcCompress args{x.const_data_ptr(),
                         x.numel(),
                         int(x.element_size()),
                         static_cast<uint32_t*>(mask.mutable_data_ptr()),
                         values.mutable_data_ptr(),
                         x.numel(),
                         size};
  const at::Tensor memory = workspace(x, zvc_compress_workspace(args));
  zvc_compress(args, memory.mutable_data_ptr(), 0, at::cuda::getCurrentCUDAStream());
}

void zvc_decompress_into(const at::Tensor& mask, const at::Tensor& values, const at::Tensor& out) {
  const ZvcDecompress args{static_cast<const uint32_t*>(mask.const_data_ptr()),
                           values.const_data_ptr(),
                           values.numel(),
                           out.mutable_data_ptr(),
                           out.numel(),
                           int(out.element_size())};
  const at::Tensor memory = workspace(out, zvc_decompress_workspace(args));
  zvc_decompress(args, memory.mutable_data_ptr(), 0, at::cuda::getCurrentCUDAStream());
}

namespace {

Compressed zvc_compress_cuda(const at::Tensor& tensor) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  const at::Tensor x = check_compressible("zvc_compress", tensor);
  const int64_t n = x.numel();
  at::Tensor mask = at::empty({n / 32 + (n % 32 != 0)}, x.options().dtype(at::kInt));
  at::Tensor values = at::empty({n}, x.options()), size = at::empty({}, x.options().dtype(at::kLong));
  zvc_compress_into(x, mask, values, size.mutable_data_ptr<int64_t>());
  return {mask, values, size};
}

at::Tensor zvc_decompress_cuda(const at::Tensor& mask, const at::Tensor& values, at::IntArrayRef shape) {
  check_zvc("zvc_decompress", mask, values, shape);
  const c10::cuda::CUDAGuard guard(values.device());
  at::Tensor out = at::empty(shape, values.options());
  zvc_decompress_into(mask.contiguous(), values.contiguous(), out);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("zvc_compress", zvc_compress_cuda);
  m.impl("zvc_decompress", zvc_decompress_cuda);
}

}  // namespace weft::offload
