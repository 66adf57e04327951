// The one way a kernel of nvcc is launched: limits are checked first, and the kernel is named in the error.
// Torch-free, so that a .cu file that includes only this compiles in seconds.
#pragma once
#include <cuda_runtime.h>

#include <array>
#include <tuple>
#include <utility>

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

// Blocks that are resident at once when `kernel` has the device to itself.
template <typename... Params>
int64_t resident_blocks(const char* name, void (*kernel)(Params...), dim3 block, size_t shared_bytes) {
  int blocks = 0;
  cuda_check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, int(block.x * block.y * block.z), shared_bytes),
      name);
  return int64_t(blocks) * device_limits().sm_count;
}

// Launches `kernel` so that all its blocks are resident at once and may wait for each other; refuses what cannot be.
template <typename... Params, typename... Args>
void launch_cooperative(const char* name, void (*kernel)(Params...), Grid grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, Args&&... args) {
  if (grid.empty()) return;
  if (!device_limits().cooperative_launch) refuse_launch(name, "the device cannot launch it cooperatively");
  for (const std::string& why : {grid_obstacle(grid), block_obstacle(block, shared_bytes)}) {
    if (!why.empty()) refuse_launch(name, why);
  }
  if (shared_bytes > 48 * 1024) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), name);
  }
  const int64_t resident = resident_blocks(name, kernel, block, shared_bytes);
  if (grid.x * grid.y * grid.z > resident) {
    refuse_launch(name, "grid " + grid.text() + " above the " + std::to_string(resident) + " blocks resident at once");
  }
  std::tuple<Params...> values(std::forward<Args>(args)...);
  auto arguments = std::apply([](auto&... value) { return std::array<void*, sizeof...(Params)>{&value...}; }, values);
  cuda_check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), grid.dims(), block, arguments.data(),
                                         shared_bytes, stream),
             name);
}

// Blocks of a cluster beyond this number are for devices that allow it; 16 is the most of any.
constexpr int kPortableCluster = 8, kLargestCluster = 16;

// Whether the device can run `kernel` in clusters of so many blocks.
template <typename... Params>
bool runs_in_clusters(const char* name, void (*kernel)(Params...), int64_t blocks, dim3 block, size_t shared_bytes) {
  if (device_limits().compute_capability < 90 || blocks > kLargestCluster) return false;
  // Code for an older architecture, which a newer device compiles for itself, has no barrier of a cluster.
  cudaFuncAttributes attributes{};
  cuda_check(cudaFuncGetAttributes(&attributes, kernel), name);
  if (attributes.ptxVersion < 90) return false;
  if (blocks > kPortableCluster) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
  }
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(blocks), config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.attrs = &size, config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // a size that the device does not know
    return false;
  }
  return clusters > 0;
}

// Launches clusters of so many blocks, which `runs_in_clusters` has allowed.
template <typename... Params, typename... Args>
void launch_clusters(const char* name, void (*kernel)(Params...), int64_t clusters, int64_t blocks, dim3 block,
                     size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(clusters * blocks), config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = stream, config.attrs = &size, config.numAttrs = 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name);
}

}  // namespace weft
