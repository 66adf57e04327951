// zvc_compress(Tensor x) -> (Tensor mask, Tensor values, Tensor size)
// zvc_decompress(Tensor mask, Tensor values, SymInt[] shape) -> Tensor, its inverse
//
//   Zero-value compression: one bit per element, and the non-zero elements side by side. Bit-exact: an element is zero
//   only if all its bits are, so -0.0 and NaN of any payload are kept.
//
// x       float32, float16 or bfloat16, any shape and strides; its n elements are taken in row-major order
// mask    int32 (ceil(n/32),): bit b, lowest first, of word w is 1 where element 32 w + b is not zero; bits past n
//         are 0
// values  dtype of x, (n,): the first `size` are those elements in order; the rest is unspecified
// size    int64 (), on x's device: learning it costs no synchronisation
//
// The inverse gives a contiguous tensor of `shape`, zeros as +0.0. values may be longer than needed, or exactly
// values[:size].
//
// New tensors; nothing is aliased. Deterministic. n may be 0 or beyond 2^31. Errors: TypeError for other dtypes;
// ValueError for a mask that does not fit the shape, a negative shape, dimensions other than 1, and, on the CPU alone,
// values that are too short (CUDA reads nothing outside them and leaves missing elements unspecified); RuntimeError if
// devices differ. Not differentiable: a backward through either raises a RuntimeError.
//
// Source: Rhu et al., "Compressing DMA engine" (HPCA 2018), section V-B.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/op_handle.h"

namespace weft::offload {

using Compressed = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Float32, float16 or bfloat16; x contiguous.
at::Tensor check_compressible(const char* op, const at::Tensor& x);
// The number of elements of a shape without negative sizes.
int64_t check_numel(const char* op, at::IntArrayRef shape);
// int32 (`name`, of any length) and values, both 1-D and on one device.
void check_compressed(const char* op, const char* name, const at::Tensor& words, const at::Tensor& values);
// All checks of zvc_decompress's arguments; returns the number of elements.
int64_t check_zvc(const char* op, const at::Tensor& mask, const at::Tensor& values, at::IntArrayRef shape);

Compressed zvc_compress_cpu(const at::Tensor& x);

inline const OpHandle<Compressed(const at::Tensor&)> zvc_compress_op("weft::zvc_compress");
inline const OpHandle<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef)> zvc_decompress_op(
    "weft::zvc_decompress");

}  // namespace weft::offload
