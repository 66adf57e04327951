// The CUDA kernels of slices, by pointers, strides and a stream: no torch header. What they do is in slice_kernels.cu.
#pragma once
#include <cuda_runtime_api.h>

#include "scan/linear/cuda/linear_scan.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {

void slice_message_cuda(const SliceProduct& product, const void* value, bool leaves, void* message,
                        const Workspace& workspace, cudaStream_t stream);
void slice_states_cuda(const SliceStates& states, const Workspace& workspace, cudaStream_t stream);
void slice_gradients_cuda(const SliceGradients& gradients, const Workspace& workspace, cudaStream_t stream);
void slice_mend_cuda(const SliceMend& mend, cudaStream_t stream);
// The same with what comes in, which the kernel finds itself; of diagonals.
void slice_finish_cuda(SliceMend mend, const SliceStates& states, cudaStream_t stream);
void slice_finish_gradients_cuda(SliceMend mend, const SliceGradients& gradients, cudaStream_t stream);

}  // namespace weft::scan
