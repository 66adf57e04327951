#include "offload/transfer/cuda/copy_streams.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
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

// By identity. Never freed, as streams; their handles may be reused, and numbers only grow.
StreamProgress* progress_of(const void* stream) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::unordered_map<const void*, std::unique_ptr<StreamProgress>>;
  const std::lock_guard lock(*mutex);
  auto& progress = (*all)[stream];
  if (progress == nullptr) progress = std::make_unique<StreamProgress>();
  return progress.get();
}

int64_t next_number() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

}  // namespace

CudaEvent::CudaEvent(c10::cuda::CUDAStream stream)
    : device_(stream.device_index()), event_(nullptr), stream_(identity(stream)), progress_(progress_of(stream_)) {
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
  if (known_completed()) return true;
  // A query does no harm to a capture in progress, but CUDA refuses it unless the mode is relaxed.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cuda_check(status, "cudaEventQuery");
  if (recorded_ > progress_->completed) progress_->completed = recorded_;
  return completed_ = true;
}

double CudaEvent::elapsed(const Event& earlier) const {
  float ms = 0;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cuda_check(cudaEventElapsedTime(&ms, static_cast<const CudaEvent&>(earlier).event_, event_), "cudaEventElapsedTime");
  return 1e-3 * double(ms);
}

void CudaEvent::make_wait(c10::cuda::CUDAStream stream) const {
  if (known_completed()) return;
  const c10::cuda::OptionalCUDAGuard guard(device_to_set(stream));
  cuda_check(cudaStreamWaitEvent(stream.stream(), event_, 0), "cudaStreamWaitEvent");
  waiter_ = identity(stream);
  waited_ = next_number();
}

void CudaEvent::make_wait_once(c10::cuda::CUDAStream stream) const {
  if (waiter_ != identity(stream)) make_wait(stream);
}

void CudaEvent::make_wait_after_free(cudaStream_t stream) const {
  const c10::cuda::OptionalCUDAGuard guard(stream == nullptr ? std::optional(c10::Device(c10::kCUDA, device_))
                                                             : std::nullopt);
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone)
    cuda_check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  else
    cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize");
}

void CudaEvent::synchronize() const {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);  // as a query
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

void make_wait_once(const Event& event, c10::cuda::CUDAStream stream) {
  if (const Event::Pair* pair = event.pair()) {
    make_wait_once(*pair->a, stream);
    make_wait_once(*pair->b, stream);
  } else {
    static_cast<const CudaEvent&>(event).make_wait_once(stream);
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

void PinnedCopies::add(void* to, const void* from, int64_t bytes, bool whole) {
  const auto host = reinterpret_cast<uintptr_t>(kind_ == cudaMemcpyDeviceToHost ? to : from);
  for (int64_t done = 0, part; done < bytes; done += part) {
    part = bytes - done;
    if (!whole) part = std::min(part, kPinnedPiece - int64_t((host + uintptr_t(done)) % uintptr_t(kPinnedPiece)));
    to_.push_back(static_cast<char*>(to) + done);
    from_.push_back(static_cast<const char*>(from) + done);
    bytes_.push_back(size_t(part));
  }
}

void PinnedCopies::start(c10::cuda::CUDAStream stream, const char* what, bool together) {
  auto to = std::exchange(to_, {});
  auto from = std::exchange(from_, {});
  auto bytes = std::exchange(bytes_, {});
  const auto keep_memory = c10::make_scope_exit([&] {
    to.clear(), from.clear(), bytes.clear();
    to_ = std::move(to), from_ = std::move(from), bytes_ = std::move(bytes);
  });
#if CUDART_VERSION >= 13000
  if (together && to.size() > 1) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    const cudaMemLocation device{cudaMemLocationTypeDevice, stream.device_index()}, host{cudaMemLocationTypeHost, 0};
    const bool out = kind_ == cudaMemcpyDeviceToHost;
    attributes.srcLocHint = out ? device : host;
    attributes.dstLocHint = out ? host : device;
    size_t first = 0;
    if (cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1,
                             stream.stream()) == cudaSuccess)
      return;
    cudaGetLastError();  // a driver that cannot: one by one
  }
#endif
  for (size_t i = 0; i < to.size(); ++i)
    cuda_check(cudaMemcpyAsync(to[i], from[i], bytes[i], kind_, stream.stream()), what);
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

// Copies out in progress, by the address of the memory that they read.
struct Sources {
  struct Copy {
    cudaStream_t moved_on;
    CudaEventPtr out;
  };
  std::mutex mutex;
  std::unordered_multimap<size_t, Copy> copies;
  std::atomic<int64_t> count = 0;
};

// Runs on any thread with the allocator's lock held. It takes no lock but that of `sources`, whose holders never call
// the allocator.
void on_allocator_trace(Sources& sources, const c10::CachingDeviceAllocator::TraceEntry& entry) {
  if (sources.count == 0 || entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_REQUESTED) return;
  const std::lock_guard lock(sources.mutex);
  const auto [begin, end] = sources.copies.equal_range(size_t(entry.addr_));
  for (auto it = begin; it != end; ++it) {
    const auto own = static_cast<cudaStream_t>(entry.stream_);
    const auto& [moved_on, out] = it->second;
    try {
      out->make_wait_after_free(own);
      // The allocator frees memory of another stream when an event that it records there has completed.
      if (moved_on != own) out->make_wait_after_free(moved_on);
    } catch (...) {  // the device is gone
    }
  }
}

// Never freed: the allocator keeps the callback.
Sources& sources() {
  static Sources* const all = [] {
    auto* const made = new Sources;
    try {
      c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
          [made](const auto& entry) { on_allocator_trace(*made, entry); });
    } catch (const c10::Error&) {  // an allocator without traces
    }
    return made;
  }();
  return *all;
}

}  // namespace

void guard_source(const void* data, c10::cuda::CUDAStream moved_on, CudaEventPtr out) {
  Sources& all = sources();
  const std::lock_guard lock(all.mutex);
  all.copies.emplace(reinterpret_cast<size_t>(data), Sources::Copy{moved_on.stream(), std::move(out)});
  ++all.count;
}

void release_source(const void* data, const CudaEventPtr& out) {
  Sources& all = sources();
  const std::lock_guard lock(all.mutex);
  const auto [begin, end] = all.copies.equal_range(reinterpret_cast<size_t>(data));
  for (auto it = begin; it != end; ++it)
    if (it->second.out == out) {
      all.copies.erase(it);
      --all.count;
      return;
    }
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
