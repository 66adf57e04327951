// Launcher of zeros_changed_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/zeros_changed_args.h"

namespace weft::sparse {

void zeros_changed_cuda(const StoredZeros* parts, int64_t count, int element_size, int* changed, cudaStream_t stream);

}  // namespace weft::sparse
