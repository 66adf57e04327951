// Products of float matrices with fp32 accuracy on the tensor cores. Free of torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::vertex {

// result (rows, columns) = left (rows, inner) @ right (inner, columns) [+ bias], added to it where `more`. Of each
// factor neighbours are either along `inner` or across it; `stride` is the other one's, in elements.
struct FloatProduct {
  struct Factor {
    const float* data;
    int64_t stride;
    bool by_inner;
  };
  Factor left, right;
  float* result;
  int64_t stride;     // between its rows
  const float* bias;  // of the columns; null where there is none
  int64_t rows, columns, inner;
  bool more;
};

// Whether the current device has the kernel, and the factors are aligned to 16 bytes as it copies them.
bool takes_float_product(const FloatProduct& p);

void launch_float_product(const FloatProduct& p, cudaStream_t stream);

}  // namespace weft::vertex
