// Whether torch's settings let products of float32 on CUDA round their factors to TF32.
#pragma once
#include <ATen/Context.h>

namespace weft {

// torch's effective precision of an operation, whichever of its settings set it.
inline bool takes_tf32(at::Float32Op op) {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
}

}  // namespace weft
