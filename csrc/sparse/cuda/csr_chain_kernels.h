// Launcher of csr_chain_kernels.cu. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>

#include "sparse/csr_chain_args.h"

namespace weft::sparse {

// A number on the device that is zero, in the order of the stream, and that is used up.
using Counter = std::function<unsigned*()>;

void csr_chain_cuda(const CsrLink* links, int64_t count, DType dtype, bool wide, int64_t batch, const Counter& counter,
                    cudaStream_t stream);

}  // namespace weft::sparse
