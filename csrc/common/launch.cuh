// The one way a kernel is launched: limits are checked first, and the kernel is named in the error.
// Torch-free, so that a .cu file that includes only this compiles in seconds.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"

namespace weft {

// Blocks of a launch in 64 bits, so that a count beyond the device's limit is refused, not cut.
struct Grid {
  int64_t x, y = 1, z = 1;
  Grid(int64_t x_, int64_t y_ = 1, int64_t z_ = 1) : x(x_), y(y_), z(z_) {}
  Grid(dim3 d) : x(d.x), y(d.y), z(d.z) {}
};

// Launches `kernel` on `stream`. Call it only from the file that defines the kernel: CUDA 13 makes kernel stubs
// file-local. A grid with an empty dimension is an empty problem and launches nothing.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), Grid grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  auto refuse = [&](const std::string& why) {
    throw std::runtime_error(std::string("weft: kernel ") + name + ": " + why);
  };
  if (grid.y > 65535 || grid.z > 65535 || grid.x > 2147483647) {
    refuse("grid (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z) +
           ") above the device's limit");
  }
  if (size_t(block.x) * block.y * block.z > 1024) {
    refuse("block of " + std::to_string(size_t(block.x) * block.y * block.z) + " threads above 1024");
  }
  if (shared_bytes > size_t(device_limits().max_shared_per_block)) {
    refuse(std::to_string(shared_bytes) + " bytes of shared memory, the device has " +
           std::to_string(device_limits().max_shared_per_block));
  }
  if (shared_bytes > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), name);
  }
  kernel<<<dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), block, shared_bytes, stream>>>(
      static_cast<Params>(args)...);
  cuda_check(cudaGetLastError(), name);
}

}  // namespace weft
