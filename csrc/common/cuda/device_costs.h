// The costs of the current device. Torch-free.
#pragma once
#include <memory>

#include "common/costs.h"
#include "common/device.h"

namespace weft {

// What the driver tells of a device.
costs::Gpu gpu_facts(int device);

// Of a device, made once.
const costs::Costs& device_costs(int device);

// What a room takes from the costs of the current device: a View is constructed from them once per thread and device.
template <typename View>
const View& costs_here() {
  static thread_local std::unique_ptr<const View> views[64];
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < 0 || device >= 64)
    throw std::runtime_error("weft: device index " + std::to_string(device) + " above 63");
  if (!views[device]) views[device] = std::make_unique<const View>(device_costs(device));
  return *views[device];
}

}  // namespace weft
