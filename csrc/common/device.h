// The current device's limits, and the check of a call of the CUDA runtime. Torch-free, for kernels and hosts.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace weft {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // or the next one who asks takes it for theirs
    throw std::runtime_error(std::string("weft: ") + what + ": " + cudaGetErrorString(status));
  }
}

// Properties of the current device, read once per device. The values do not change while a process lives.
struct DeviceLimits {
  int sm_count;
  int max_shared_per_block;  // opt-in limit, bytes
  int compute_capability;    // 90 for sm_90
  bool cooperative_launch;
};

inline const DeviceLimits& device_limits() {
  static thread_local DeviceLimits cache[64];
  static thread_local bool known[64] = {};
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < 0 || device >= 64)
    throw std::runtime_error("weft: device index " + std::to_string(device) + " above 63");
  if (!known[device]) {
    auto attribute = [device](cudaDeviceAttr a) {
      int value = 0;
      cuda_check(cudaDeviceGetAttribute(&value, a, device), "cudaDeviceGetAttribute");
      return value;
    };
    cache[device] = {attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                     10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
                     attribute(cudaDevAttrCooperativeLaunch) != 0};
    known[device] = true;
  }
  return cache[device];
}

}  // namespace weft
