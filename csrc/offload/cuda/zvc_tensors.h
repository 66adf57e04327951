// The launchers of zvc_compress on contiguous tensors of one device, the current one, and its current stream.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>

namespace weft::offload {

at::Tensor workspace(const at::Tensor& like, size_t bytes);
void zvc_compress_into(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& values, int64_t* size);
void zvc_decompress_into(const at::Tensor& mask, const at::Tensor& values, const at::Tensor& out);

}  // namespace weft::offload
