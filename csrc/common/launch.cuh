// The one way a kernel of nvcc is launched: limits are checked first, and the kernel is named in the error.
// Torch-free, so that a .cu file that includes only this compiles in seconds.
#pragma once
#include <cuda_runtime.h>

#include "common/launch.h"

namespace weft {

// Launches `kernel` on `stream`. Call it only from the file that defines the kernel: CUDA 13 makes kernel stubs
// file-local.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), Grid grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  if (grid.empty()) return;
  for (const std::string& why : {grid_obstacle(grid), block_obstacle(block, shared_bytes)}) {
    if (!why.empty()) refuse_launch(name, why);
  }
  if (shared_bytes > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), name);
  }
  kernel<<<grid.dims(), block, shared_bytes, stream>>>(static_cast<Params>(args)...);
  cuda_check(cudaGetLastError(), name);
}

}  // namespace weft
