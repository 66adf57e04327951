#include "common/cuda/device_costs.h"

#include <map>
#include <mutex>

namespace weft {

costs::Gpu gpu_facts(int device) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    cuda_check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  // Clocks are 0 on devices that do not tell them.
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const double memory_hz = 1e3 * attribute(cudaDevAttrMemoryClockRate);
  const int capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  // Two transfers a cycle.
  return {properties.name, capability, attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrClockRate) / 1e3,
          2 * memory_hz * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8 / 1e9};
}

const costs::Costs& device_costs(int device) {
  static std::mutex mutex;
  static std::map<int, costs::Costs> known;  // nodes stay where they are
  const std::lock_guard lock(mutex);
  const auto found = known.find(device);
  return found != known.end() ? found->second : known.emplace(device, costs::of(gpu_facts(device))).first->second;
}

}  // namespace weft
