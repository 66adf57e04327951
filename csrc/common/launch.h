// What every launch is checked for, whichever compiler the kernel is from: launch.cuh launches those of nvcc, jit/jit.h
// those of NVRTC. A refusal names the kernel. Torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"

namespace weft {

// Blocks of a launch in 64 bits, so that a count beyond the device's limit is refused, not cut. A grid with an empty
// dimension is an empty problem and launches nothing.
struct Grid {
  int64_t x, y = 1, z = 1;
  Grid(int64_t x_, int64_t y_ = 1, int64_t z_ = 1) : x(x_), y(y_), z(z_) {}
  Grid(dim3 d) : x(d.x), y(d.y), z(d.z) {}
  bool empty() const { return x == 0 || y == 0 || z == 0; }
  dim3 dims() const { return dim3(unsigned(x), unsigned(y), unsigned(z)); }
  std::string text() const {
    return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
  }
};

[[noreturn]] inline void refuse_launch(const std::string& kernel, const std::string& why) {
  throw std::runtime_error("weft: kernel " + kernel + ": " + why);
}

// Why a grid or a block cannot run, empty where it can.
inline std::string grid_obstacle(const Grid& grid) {
  if (grid.x <= 2147483647 && grid.y <= 65535 && grid.z <= 65535) return {};
  return "grid " + grid.text() + " above the device's limit (2147483647, 65535, 65535)";
}
inline std::string block_obstacle(dim3 block, size_t shared_bytes, size_t max_threads = 1024,
                                  size_t static_shared_bytes = 0) {
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > max_threads) {
    return "block of " + std::to_string(threads) + " threads, the kernel takes 1 to " + std::to_string(max_threads);
  }
  const size_t most = size_t(device_limits().max_shared_per_block);
  if (shared_bytes + static_shared_bytes > most) {
    return std::to_string(shared_bytes) + " + " + std::to_string(static_shared_bytes) +
           " bytes of shared memory, a block of the device has " + std::to_string(most);
  }
  return {};
}

}  // namespace weft
