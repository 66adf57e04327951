// Launcher of csr_chain_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>

#include "sparse/csr_chain_args.h"

namespace weft::sparse {

// Memory on the device that is the caller's until its work on the stream is done: of so many bytes, zero or not.
using Scratch = std::function<void*(int64_t bytes, bool zero)>;

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, const Scratch& scratch,
                    cudaStream_t stream);

}  // namespace weft::sparse
