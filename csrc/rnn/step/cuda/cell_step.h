// The CUDA kernels of weft::rnn_cell: pointers, sizes and a stream. No torch header.
#pragma once
#include <cuda_runtime_api.h>

#include "rnn/step/cell_step.h"

namespace weft::rnn {

// Up to so many sequences the kernel makes the products itself, of so many weights: always of 4, and of 32 while that
// takes less than cuBLAS takes to be called.
constexpr int64_t few_sequences(int64_t weights) {
  constexpr int64_t kMultiplyAdds = int64_t{1} << 27;
  return 32 * weights <= kMultiplyAdds ? 32 : 4;
}
// Up to so many the backward kernel can sum the columns of dgates.
constexpr int64_t kSummedSequences = 256;

// Products, of the element type, or null where the kernel makes them.
void cell_step_forward(CellElement element, const CellForwardArgs& args, cudaStream_t stream);
void cell_step_backward(CellElement element, const CellBackwardArgs& args, cudaStream_t stream);

}  // namespace weft::rnn
