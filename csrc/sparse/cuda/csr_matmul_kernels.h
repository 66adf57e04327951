// Launchers of csr_matmul_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/csr_matmul_args.h"

namespace weft::sparse {

void csr_matmul_cuda(const CsrMatmul& args, cudaStream_t stream);
void csr_matmul_left_cuda(const CsrMatmul& args, cudaStream_t stream);
void csr_matmul_right_cuda(const CsrMatmul& args, cudaStream_t stream);

}  // namespace weft::sparse
