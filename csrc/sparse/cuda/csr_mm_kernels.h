// Launchers of csr_mm_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/csr_mm_args.h"

namespace weft::sparse {

void csr_mm_cuda(const CsrMm& args, cudaStream_t stream);
void csr_sampled_mm_cuda(const CsrSampledMm& args, cudaStream_t stream);

}  // namespace weft::sparse
