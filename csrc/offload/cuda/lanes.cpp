#include "offload/cuda/lanes.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "offload/cuda/pinned.h"

namespace weft::offload {
namespace {

// Events of each device that nobody uses. Never freed: the process may end after the driver did.
struct Events {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<cudaEvent_t>> free;
};
Events& events() {
  static Events* all = new Events;
  return *all;
}

}  // namespace

CudaMark::CudaMark(c10::cuda::CUDAStream stream) : device_(stream.device_index()), event_(nullptr) {
  const c10::cuda::CUDAGuard guard(device_);
  {
    const std::lock_guard lock(events().mutex);
    auto& free = events().free[device_];
    if (!free.empty()) {
      event_ = free.back();
      free.pop_back();
    }
  }
  if (event_ == nullptr) cuda_check(cudaEventCreate(&event_), "cudaEventCreate");
  cuda_check(cudaEventRecord(event_, stream.stream()), "cudaEventRecord");
}

CudaMark::~CudaMark() {
  const std::lock_guard lock(events().mutex);
  events().free[device_].push_back(event_);
}

bool CudaMark::passed() const {
  if (passed_) return true;
  // A query is harmless to a capture that is under way, but CUDA refuses it there unless told so.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cuda_check(status, "cudaEventQuery");
  return passed_ = true;
}

double CudaMark::since(const Mark& earlier) const {
  float ms = 0;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cuda_check(cudaEventElapsedTime(&ms, static_cast<const CudaMark&>(earlier).event_, event_), "cudaEventElapsedTime");
  return 1e-3 * double(ms);
}

void CudaMark::hold(c10::cuda::CUDAStream stream) const {
  if (passed_) return;
  const c10::cuda::CUDAGuard guard(stream.device_index());
  cuda_check(cudaStreamWaitEvent(stream.stream(), event_, 0), "cudaStreamWaitEvent");
}

void CudaMark::synchronize() const {
  if (!passed_) cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  passed_ = true;
}

c10::Storage allocate_on(c10::Device device, int64_t bytes) {
  const c10::cuda::CUDAGuard guard(device.index());
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  return c10::Storage(c10::Storage::use_byte_size_t(), size_t(bytes), allocator->allocate(size_t(bytes)), allocator,
                      /*resizable=*/false);
}

c10::DataPtr scratch(c10::cuda::CUDAStream stream, size_t bytes) {
  const c10::cuda::CUDAStreamGuard guard(stream);
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max<size_t>(bytes, 16));
}

Staging::~Staging() {
  try {
    release();
  } catch (...) {  // the device is gone
  }
}

void Staging::reserve(int64_t bytes) {
  if (bytes <= bytes_) return;
  release();
  for (Slot& slot : slots_) slot.memory = scratch(stream_, size_t(bytes));
  // Memory that others on the stream may still use.
  const CudaMarkPtr made = mark_on(stream_);
  for (Slot& slot : slots_) slot.read = made;
  bytes_ = bytes;
}

Staging::Slot& Staging::next(c10::cuda::CUDAStream writer) {
  Slot& slot = slots_[turn_++ % kSlots];
  slot.read->hold(writer);
  return slot;
}

void Staging::release() {
  bytes_ = 0;
  for (Slot& slot : slots_) {
    if (slot.read != nullptr) std::exchange(slot.read, nullptr)->hold(stream_);
    slot.memory = {};
  }
}

void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(storage.data_ptr(), stream);
}

std::shared_ptr<int64_t> pinned_number(int64_t value) {
  struct Numbers {
    std::mutex mutex;
    std::vector<int64_t*> free;
  };
  static Numbers* const all = new Numbers;
  const std::lock_guard lock(all->mutex);
  if (all->free.empty()) {
    void* const data = allocate_pinned(4096);
    if (data == nullptr) throw std::runtime_error("offload: the system refuses 4096 bytes of pinned host memory");
    for (int64_t* p = static_cast<int64_t*>(data); p < static_cast<int64_t*>(data) + 512; ++p) all->free.push_back(p);
  }
  int64_t* const p = all->free.back();
  all->free.pop_back();
  *p = value;
  return {p, [](int64_t* number) {
            const std::lock_guard lock(all->mutex);
            all->free.push_back(number);
          }};
}

}  // namespace weft::offload
