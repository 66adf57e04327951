// weft::zeros_changed(weights, stored) -> Tensor: whether some weight has other zeros than it had.
//
//   weights  of any shapes, contiguous, one floating dtype, one device
//   stored   bool, the same shapes: where each was not zero
//   returns  (1,) int32 on that device: 0 where all are as they were, else 1
//
// Nothing waits for the device: a caller brings the number to the host beside other work. On CUDA one kernel for up to
// 64 weights. Integers: no gradient.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "sparse/zeros_changed_args.h"

namespace weft::sparse {

using RunZeros = void (*)(const std::vector<StoredZeros>& parts, int element_size, int* changed);

at::Tensor zeros_changed_forward(RunZeros run, at::TensorList weights, at::TensorList stored);

}  // namespace weft::sparse
