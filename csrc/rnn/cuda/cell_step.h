// The CUDA kernels of weft::rnn_cell: pointers, sizes and a stream. No torch header.
#pragma once
#include <cuda_runtime_api.h>

#include "rnn/cell_step.h"

namespace weft::rnn {

// Up to so many sequences the kernel makes the products itself.
constexpr int64_t kFewSequences = 4;
// Up to so many the backward kernel can sum the columns of dgates.
constexpr int64_t kSummedSequences = 256;

// Products, of the element type, or null for at most kFewSequences sequences.
void cell_step_forward(CellElement element, const CellForwardArgs& args, cudaStream_t stream);
void cell_step_backward(CellElement element, const CellBackwardArgs& args, cudaStream_t stream);

}  // namespace weft::rnn
