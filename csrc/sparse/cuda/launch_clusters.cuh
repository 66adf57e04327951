// Several clusters of one kernel.
#pragma once
#include "common/launch.cuh"

namespace weft::sparse {

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

}  // namespace weft::sparse
