// The CUDA kernels of slice_product, by pointers, strides and a stream: no torch header. What they do is in
// product_kernels.cu.
#pragma once
#include <cuda_runtime_api.h>

#include "scan/linear/cuda/linear_scan.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {

// Float, and H up to this.
constexpr int64_t kProductMaxH = 32;

// Writes the packed product, (B, H, H), contiguous. B and H are not 0.
void slice_product_cuda(const DenseProduct& product, int32_t* out, const Workspace& workspace, cudaStream_t stream);

}  // namespace weft::scan
