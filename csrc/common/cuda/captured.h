// Host memory that a captured copy reads whenever its graph is replayed: it stays as long as the graph.
#pragma once
#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft {

// Keeps a tensor until every graph that this capture ends in is gone. Where `stream` does not capture, keeps
// nothing, and frees what graphs that are gone have left.
void keep_while_captured(const at::Tensor& tensor, cudaStream_t stream);

// Tensors kept at present.
int64_t captured_count();

}  // namespace weft
