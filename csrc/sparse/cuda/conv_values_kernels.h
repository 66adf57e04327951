// Launchers of conv_values_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/conv_values_args.h"

namespace weft::sparse {

void conv_pattern_cuda(const Conv& args, cudaStream_t stream);
void conv_values_cuda(const Conv& args, cudaStream_t stream);
void conv_values_backward_cuda(const Conv& args, cudaStream_t stream);

}  // namespace weft::sparse
