// Launches on a processor: block after block, those of a cooperative launch together.
#pragma once
#include <cuda_runtime_api.h>

#include "emulator.h"

namespace weft {

inline void cuda_check(int, const char*) {}
inline int cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return 0;
}
constexpr int cudaMemcpyDeviceToDevice = 3;
inline int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return 0;
}

struct Grid {
  int64_t x, y = 1, z = 1;
  Grid(int64_t x_, int64_t y_ = 1, int64_t z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct DeviceLimits {
  int sm_count;
};
inline int processors = 3;
inline DeviceLimits device_limits() {
  return {processors};
}

struct Position {
  unsigned x, y, z;
};
inline Position block_position, grid_size, block_size;
inline bool cooperative;
inline unsigned seed;

inline Position position() {
  return cooperative ? Position{emulator::current->block_index.x, 0, 0} : block_position;
}

template <typename... Params, typename... Args>
void run_kernel(void (*kernel)(Params...), int64_t blocks, int threads, int cluster, size_t shared_bytes,
                const Args&... args) {
  static std::function<void()> body;
  block_size = {unsigned(threads), 1, 1};
  body = [&] { kernel(args...); };
  emulator::launch([] { body(); }, int(blocks), threads, cluster, shared_bytes, ++seed);
}

template <typename... Params, typename... Args>
void launch(const char*, void (*kernel)(Params...), Grid grid, int threads, size_t shared_bytes, cudaStream_t,
            const Args&... args) {
  cooperative = false, grid_size = {unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)};
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        block_position = {x, y, z};
        run_kernel(kernel, 1, threads, 1, shared_bytes, args...);
      }
    }
  }
}

template <typename... Params>
int64_t resident_blocks(const char*, void (*)(Params...), int, size_t) {
  return 3;
}

template <typename... Params, typename... Args>
void launch_cooperative(const char*, void (*kernel)(Params...), Grid grid, int threads, size_t, cudaStream_t,
                        const Args&... args) {
  cooperative = true, grid_size = {unsigned(grid.x), 1, 1};
  run_kernel(kernel, grid.x, threads, 1, 0, args...);
}

constexpr int kLargestCluster = 16;
inline bool with_clusters = true;

template <typename... Params>
bool runs_in_clusters(const char*, void (*)(Params...), int64_t blocks, int, size_t) {
  return with_clusters && blocks <= kLargestCluster;
}

template <typename... Params, typename... Args>
void launch_clusters(const char*, void (*kernel)(Params...), int64_t clusters, int64_t blocks, int threads,
                     size_t shared_bytes, cudaStream_t, const Args&... args) {
  cooperative = true, grid_size = {unsigned(clusters * blocks), 1, 1};
  run_kernel(kernel, clusters * blocks, threads, int(blocks), shared_bytes, args...);
}

}  // namespace weft

#undef blockIdx
#define blockIdx (weft::position())
#define gridDim (weft::grid_size)
#define blockDim (weft::block_size)
