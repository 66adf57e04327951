#include "vertex/exec/cuda/counters.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <map>
#include <mutex>
#include <utility>

namespace weft::vertex {

Counters zeroed_counters(int count) {
  constexpr int kAtOnce = 1 << 16;
  struct Pool {
    at::Tensor zeros;
    int used = 0;
  };
  static std::mutex mutex;
  // Never freed: at the end of the process there is no device any more.
  static auto& pools = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Pool>();

  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const auto make = [&](int n) {
    const c10::Device device(at::kCUDA, stream.device_index());
    return at::zeros({n}, at::TensorOptions().dtype(at::kInt).device(device));
  };
  if (count > kAtOnce || at::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    at::Tensor zeros = make(count);
    int* const first = static_cast<int*>(zeros.mutable_data_ptr());
    return {first, std::move(zeros)};
  }
  const std::lock_guard lock(mutex);
  Pool& pool = pools[{stream.device_index(), stream.id()}];
  if (!pool.zeros.defined() || pool.used + count > kAtOnce) pool = {make(kAtOnce), 0};
  int* const found = static_cast<int*>(pool.zeros.mutable_data_ptr()) + pool.used;
  pool.used += count;
  return {found, pool.zeros};
}

}  // namespace weft::vertex
