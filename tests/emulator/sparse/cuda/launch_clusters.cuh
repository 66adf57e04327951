// csrc/sparse/cuda/launch_clusters.cuh on a processor.
#pragma once
#include "common/launch.cuh"

namespace weft::sparse {

template <typename... Params, typename... Args>
void launch_clusters(const char*, void (*kernel)(Params...), int64_t clusters, int64_t blocks, int threads,
                     size_t shared_bytes, cudaStream_t, const Args&... args) {
  cooperative = true, grid_size = {unsigned(clusters * blocks), 1, 1};
  run_kernel(kernel, clusters * blocks, threads, int(blocks), shared_bytes, args...);
}

}  // namespace weft::sparse
