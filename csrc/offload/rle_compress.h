// rle_compress(Tensor x) -> (Tensor runs, Tensor values, Tensor size)
// rle_decompress(Tensor runs, Tensor values, SymInt[] shape) -> Tensor, its inverse
//
//   Run-length coding of zeros, for comparison with zvc_compress: alternating lengths of runs of zeros and of
//   non-zeros, and the non-zero elements side by side. Zero means the same as there.
//
// x       float32, float16 or bfloat16, any shape and strides; its n elements are taken in row-major order
// runs    int32 (n + 1,): lengths, zeros first, 0 where x starts with another element; the rest of runs is 0. A run
//         above 2^31 - 1 is split by a run of length 0
// values  dtype of x, (n,), as of zvc_compress
// size    int64 (2,), on x's device: runs used, without zero-length runs at the end, and values used
//
// The inverse gives a contiguous tensor of `shape`; runs[:size[0]] and values[:size[1]] are enough. The CPU raises a
// ValueError if the runs do not add up to the shape, one is negative, or values are too short; CUDA reads and writes
// nothing outside, and leaves the elements unspecified. All else is as for zvc_compress.
//
// Source: Rhu et al., "Compressing DMA engine" (HPCA 2018), section V-A.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "common/op_handle.h"
#include "offload/zvc_compress.h"

namespace weft::offload {

// All checks of rle_decompress's arguments; returns the number of elements.
int64_t check_rle(const char* op, const at::Tensor& runs, const at::Tensor& values, at::IntArrayRef shape);

inline const OpHandle<Compressed(const at::Tensor&)> rle_compress_op("weft::rle_compress");
inline const OpHandle<at::Tensor(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef)> rle_decompress_op(
    "weft::rle_decompress");

}  // namespace weft::offload
