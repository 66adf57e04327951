// Launcher of max_pool_values_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/max_pool_values_args.h"

namespace weft::sparse {

void max_pool_values_cuda(const MaxPool& args, cudaStream_t stream);

}  // namespace weft::sparse
