// The limits of a device that a test names, for csrc's planning without CUDA.
#pragma once
#include <stdexcept>
#include <string>

using cudaStream_t = struct CUstream_st*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
struct dim3 {
  explicit dim3(unsigned) {}
};

namespace weft {

inline void cuda_check(cudaError_t, const char*) {}

struct DeviceLimits {
  int sm_count, max_shared_per_block, compute_capability;
  bool cooperative_launch;
};
inline DeviceLimits the_limits{};
inline const DeviceLimits& device_limits() {
  return the_limits;
}

}  // namespace weft
