#include "offload/cuda/lanes.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "offload/cuda/pinned.h"

namespace weft::offload {
namespace {

// Events of each device that nobody uses. Never freed: the process may end after the driver did.
struct Events {
  std::mutex mutex;
  std::vector<std::vector<cudaEvent_t>> free;
};
Events& events() {
  static Events* all = new Events;
  return *all;
}

// The device of a stream that is known by its handle need not be the current one; the default stream is that of the
// current device.
std::optional<c10::Device> device_to_set(c10::cuda::CUDAStream stream) {
  return stream.stream() == nullptr ? std::optional(stream.device()) : std::nullopt;
}

// One for every device: handles of default streams are the same for all.
const void* identity(c10::cuda::CUDAStream stream) {
  static const char defaults[C10_COMPILE_TIME_MAX_GPUS] = {};
  return stream.stream() == nullptr ? &defaults[stream.device_index()] : static_cast<const void*>(stream.stream());
}

int64_t next_number() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

}  // namespace

CudaMark::CudaMark(c10::cuda::CUDAStream stream)
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
  made_ = next_number();
}

CudaMark::~CudaMark() {
  const std::lock_guard lock(events().mutex);
  events().free[size_t(device_)].push_back(event_);
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

double CudaMark::elapsed(const Mark& earlier) const {
  float ms = 0;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cuda_check(cudaEventElapsedTime(&ms, static_cast<const CudaMark&>(earlier).event_, event_), "cudaEventElapsedTime");
  return 1e-3 * double(ms);
}

void CudaMark::hold(c10::cuda::CUDAStream stream) const {
  if (passed_) return;
  const c10::cuda::OptionalCUDAGuard guard(device_to_set(stream));
  cuda_check(cudaStreamWaitEvent(stream.stream(), event_, 0), "cudaStreamWaitEvent");
  holder_ = identity(stream);
  held_ = next_number();
}

void CudaMark::synchronize() const {
  if (!passed_) cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  passed_ = true;
}

void hold(const Mark& mark, c10::cuda::CUDAStream stream) {
  if (const Mark::Pair* pair = mark.both()) {
    hold(*pair->a, stream);
    hold(*pair->b, stream);
  } else {
    static_cast<const CudaMark&>(mark).hold(stream);
  }
}

MarkPtr mark_unless_captured(c10::Stream stream) {
  if (!stream.device().is_cuda()) return host_mark();
  const c10::cuda::CUDAStream on(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(on.stream(), &status), "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone ? mark_on(on) : nullptr;
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

namespace {

// Pinned memory that no number has: free, or given up while the device may still write to it.
struct Numbers {
  std::mutex mutex;
  std::vector<int64_t*> free;
  std::deque<std::pair<int64_t*, CudaMarkPtr>> written;
};
Numbers& numbers() {
  static Numbers* const all = new Numbers;
  return *all;
}

}  // namespace

PinnedNumber::PinnedNumber(int64_t value) {
  Numbers& all = numbers();
  const std::lock_guard lock(all.mutex);
  for (; !all.written.empty() && all.written.front().second->passed(); all.written.pop_front())
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
