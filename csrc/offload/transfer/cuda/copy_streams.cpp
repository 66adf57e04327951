#include "offload/transfer/cuda/copy_streams.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "offload/transfer/cuda/pinned.h"

namespace weft::offload {
namespace {

// Unused events of each device. Never freed: the driver may shut down before the process ends.
struct Events {
  std::mutex mutex;
  std::vector<std::vector<cudaEvent_t>> free;
};
Events& events() {
  static Events* all = new Events;
  return *all;
}

// The handle of the default stream, null, means that of the current device; other handles work on any device.
std::optional<c10::Device> device_to_set(c10::cuda::CUDAStream stream) {
  return stream.stream() == nullptr ? std::optional(stream.device()) : std::nullopt;
}

// Distinct for the default streams of different devices, which share one handle.
const void* identity(c10::cuda::CUDAStream stream) {
  static const char defaults[C10_COMPILE_TIME_MAX_GPUS] = {};
  return stream.stream() == nullptr ? &defaults[stream.device_index()] : static_cast<const void*>(stream.stream());
}

int64_t next_number() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

}  // namespace

CudaEvent::CudaEvent(c10::cuda::CUDAStream stream)
    : device_(stream.device_index()), event_(nullptr), stream_(identity(stream)) {
  {
    const std::lock_guard lock(events().mutex);
    auto& free = events().free;
    if (size_t(device_) >= free.size()) free.resize(size_t(device_) + 1);
    if (!free[size_t(device_)].empty()) {
      event_ = free[size_t(device_)].back();
      free[size_t(device_)].pop_back();
    }
  }
  if (event_ == nullptr) {
    const c10::cuda::CUDAGuard guard(device_);
    cuda_check(cudaEventCreate(&event_), "cudaEventCreate");
  }
  const c10::cuda::OptionalCUDAGuard guard(device_to_set(stream));
  cuda_check(cudaEventRecord(event_, stream.stream()), "cudaEventRecord");
  recorded_ = next_number();
}

CudaEvent::~CudaEvent() {
  const std::lock_guard lock(events().mutex);
  events().free[size_t(device_)].push_back(event_);
}

bool CudaEvent::completed() const {
  if (completed_) return true;
  // A query does no harm to a capture in progress, but CUDA refuses it unless the mode is relaxed.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cuda_check(status, "cudaEventQuery");
  return completed_ = true;
}

double CudaEvent::elapsed(const Event& earlier) const {
  float ms = 0;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cuda_check(cudaEventElapsedTime(&ms, static_cast<const CudaEvent&>(earlier).event_, event_), "cudaEventElapsedTime");
  return 1e-3 * double(ms);
}

void CudaEvent::make_wait(c10::cuda::CUDAStream stream) const {
  if (completed_) return;
  const c10::cuda::OptionalCUDAGuard guard(device_to_set(stream));
  cuda_check(cudaStreamWaitEvent(stream.stream(), event_, 0), "cudaStreamWaitEvent");
  waiter_ = identity(stream);
  waited_ = next_number();
}

void CudaEvent::synchronize() const {
  if (!completed_) cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  completed_ = true;
}

void make_wait(const Event& event, c10::cuda::CUDAStream stream) {
  if (const Event::Pair* pair = event.pair()) {
    make_wait(*pair->a, stream);
    make_wait(*pair->b, stream);
  } else {
    static_cast<const CudaEvent&>(event).make_wait(stream);
  }
}

EventPtr record_unless_captured(c10::Stream stream) {
  if (!stream.device().is_cuda()) return host_event();
  const c10::cuda::CUDAStream on(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(on.stream(), &status), "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone ? record_on(on) : nullptr;
}

c10::Storage allocate_on(c10::Device device, int64_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, !refused(refusals().device), "offload: out of memory, for a test");
  const c10::cuda::CUDAGuard guard(device.index());
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  return c10::Storage(c10::Storage::use_byte_size_t(), size_t(bytes), allocator->allocate(size_t(bytes)), allocator,
                      /*resizable=*/false);
}

c10::DataPtr scratch(c10::cuda::CUDAStream stream, size_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, !refused(refusals().device), "offload: out of memory, for a test");
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
  // Earlier work of the stream may still use the memory.
  const CudaEventPtr made = record_on(stream_);
  for (Slot& slot : slots_) slot.read = made;
  bytes_ = bytes;
}

Staging::Slot& Staging::next(c10::cuda::CUDAStream writer) {
  Slot& slot = slots_[turn_++ % kSlots];
  slot.read->make_wait(writer);
  return slot;
}

void Staging::release() {
  bytes_ = 0;
  for (Slot& slot : slots_) {
    if (slot.read != nullptr) std::exchange(slot.read, nullptr)->make_wait(stream_);
    slot.memory = {};
  }
}

void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(storage.data_ptr(), stream);
}

namespace {

// Pinned memory of dropped numbers: free, or still to be written by the device.
struct Numbers {
  std::mutex mutex;
  std::vector<int64_t*> free;
  std::deque<std::pair<int64_t*, CudaEventPtr>> written;
};
Numbers& numbers() {
  static Numbers* const all = new Numbers;
  return *all;
}

}  // namespace

PinnedNumber::PinnedNumber(int64_t value) {
  Numbers& all = numbers();
  const std::lock_guard lock(all.mutex);
  for (; !all.written.empty() && all.written.front().second->completed(); all.written.pop_front())
    all.free.push_back(all.written.front().first);
  if (all.free.empty()) {
    void* const data = allocate_pinned(4096);
    if (data == nullptr) throw NoHostMemory("offload: the system refuses 4096 bytes of pinned host memory");
    for (int64_t* p = static_cast<int64_t*>(data); p < static_cast<int64_t*>(data) + 512; ++p) all.free.push_back(p);
  }
  data_ = all.free.back();
  all.free.pop_back();
  *data_ = value;
}

PinnedNumber::~PinnedNumber() {
  Numbers& all = numbers();
  const std::lock_guard lock(all.mutex);
  if (!wanted_)
    all.free.push_back(data_);
  else if (by_ != nullptr)
    all.written.emplace_back(data_, std::move(by_));
}

}  // namespace weft::offload
