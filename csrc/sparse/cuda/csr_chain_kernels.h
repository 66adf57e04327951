// Launcher of csr_chain_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include "sparse/csr_chain_args.h"

namespace weft::sparse {

// `counter` is zero on the device; it is used up.
void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, unsigned* counter,
                    cudaStream_t stream);

}  // namespace weft::sparse
