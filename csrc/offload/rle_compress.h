// rle_compress(Tensor x) -> (Tensor runs, Tensor values, Tensor size)
// rle_decompress(Tensor runs, Tensor values, SymInt[] shape) -> Tensor, its inverse
//
//   Run-length coding of zeros, to be compared with zvc_compress: the lengths of runs of zeros and of others in turn,
//   and the elements that are not zero, side by side. What is zero is as there.
//
// x       float32, float16 or bfloat16, any shape and strides; its n elements are taken in row-major order
// runs    int32 (n + 1,): lengths, zeros first, 0 where x starts with another element; the rest of runs is 0. A run
//         above 2^31 - 1 is split by a run of length 0
// values  dtype of x, (n,), as zvc_compress has them
// size    int64 (2,), on x's device: runs used, without zero-length runs at the end, and values used
//
// The inverse gives a contiguous tensor of `shape`; runs[:size[0]] and values[:size[1]] are enough. On the CPU it is a
// ValueError where the runs do not make up the shape, one is negative, or values are too short; on CUDA nothing is read
// or written outside, and the elements are unspecified. Everything else is as zvc_compress has it.
//
// Source: Rhu et al., "Compressing DMA engine" (HPCA 2018), section V-A.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "offload/zvc_compress.h"

namespace weft::offload {

// All that rle_decompress's arguments must be; returns the number of elements.
int64_t check_rle(const char* op, const at::Tensor& runs, const at::Tensor& values, at::IntArrayRef shape);

}  // namespace weft::offload
