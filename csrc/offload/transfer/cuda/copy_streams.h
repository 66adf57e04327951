// Copy streams, events, staging memory and pinned numbers of the CUDA movers.
#pragma once
#include <c10/core/Storage.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/device.h"
#include "offload/transfer/mover.h"

namespace weft::offload {

// How far the host knows a stream to be: the position of the latest event that is known to have completed.
struct StreamProgress {
  std::atomic<int64_t> completed = 0;
};

// A CUDA event, recorded when constructed; the handles are reused. A wait covers what was recorded before the wait.
// Completion is asked of the device only where no later event of the stream is known to have completed.
class CudaEvent : public Event {
 public:
  explicit CudaEvent(c10::cuda::CUDAStream stream);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  bool completed() const override;
  // Whether the host knows that it has completed; does not ask the device.
  bool known_completed() const { return completed_ || (completed_ = progress_->completed >= recorded_); }
  const void* stream() const override { return stream_; }
  // Makes the stream's later work wait for this event.
  void make_wait(c10::cuda::CUDAStream stream) const;
  // For a stream that lives as long as the process: what already waits for it waits no second time.
  void make_wait_once(c10::cuda::CUDAStream stream) const;
  // Whether its stream waited for `other` before this event was recorded, as far as `other` remembers.
  bool is_behind(const CudaEvent& other) const { return other.waiter_ == stream_ && other.waited_ < recorded_; }
  // make_wait for callers inside torch's allocator, which may not hold Python's lock: remembers nothing. A captured
  // stream cannot wait for work outside of its graph, so the host waits instead.
  void make_wait_after_free(cudaStream_t stream) const;
  void synchronize() const;

 private:
  double elapsed(const Event& earlier) const override;

  c10::DeviceIndex device_;
  cudaEvent_t event_;
  mutable bool completed_ = false;
  const void* stream_;
  StreamProgress* progress_;
  mutable const void* waiter_ = this;  // the last stream that was made to wait for it; at first none
  // Positions in the order of all records and waits.
  int64_t recorded_;
  mutable int64_t waited_ = 0;
};
using CudaEventPtr = std::shared_ptr<const CudaEvent>;

inline CudaEventPtr record_on(c10::cuda::CUDAStream stream) {
  return std::make_shared<CudaEvent>(stream);
}

// CudaEvent::make_wait and make_wait_once, for an event that may be a pair.
void make_wait(const Event& event, c10::cuda::CUDAStream stream);
void make_wait_once(const Event& event, c10::cuda::CUDAStream stream);

// Records an event on a stream of any device; null while the stream is captured.
EventPtr record_unless_captured(c10::Stream stream);

// A ring of device memory between the copies and the codec. The writer of a slot waits for its last reader. The memory
// is allocated for one stream, by which torch's allocator knows when others may have it.
class Staging {
 public:
  static constexpr int kSlots = 3;
  struct Slot {
    c10::DataPtr memory;
    CudaEventPtr read;  // when it was last read, or allocated
    char* data() const { return static_cast<char*>(memory.get()); }
  };

  explicit Staging(c10::cuda::CUDAStream stream) : stream_(stream) {}
  ~Staging();
  // Gives every slot at least that many bytes.
  void reserve(int64_t bytes);
  // The next slot, which `writer` may write to.
  Slot& next(c10::cuda::CUDAStream writer);
  void release();

 private:
  c10::cuda::CUDAStream stream_;
  std::array<Slot, kSlots> slots_;
  int64_t bytes_ = 0;
  unsigned turn_ = 0;
};

// The streams of one device: one per direction for copies, and one beside each for the codec's kernels, so that the bus
// stays busy while they run. They have high priority: the codec's short kernels must not queue behind the operations
// that wait for them.
struct CopyStreams {
  CopyStreams(c10::DeviceIndex device, int64_t segment)
      : segment(segment),
        out(c10::cuda::getStreamFromPool(true, device)),
        in(c10::cuda::getStreamFromPool(true, device)),
        compress(c10::cuda::getStreamFromPool(true, device)),
        decompress(c10::cuda::getStreamFromPool(true, device)),
        staging(compress) {}
  const int64_t segment;  // bytes of a tensor that the codec stages at a time
  c10::cuda::CUDAStream out, in, compress, decompress;
  Staging staging;
  EventPtr last_out, last_in;  // ends of the latest copies
  int64_t outs = 0, ins = 0;   // ends of copies so far that are on the streams `out` and `in`
  // The last of them that a stream waits for by now.
  struct Waited {
    int64_t out = 0, in = 0;
  };
  Waited& waited(c10::cuda::CUDAStream stream) {
    for (auto& [waiting, last] : waited_)
      if (waiting == stream) return last;
    return waited_.emplace_back(stream, Waited{}).second;
  }

 private:
  std::vector<std::pair<c10::cuda::CUDAStream, Waited>> waited_;
};

// When a copy begins that waits for `ready` and for the copy before it on its stream.
inline EventPtr begin_of(const EventPtr& ready, const EventPtr& before) {
  return before == nullptr ? ready : std::make_shared<EventPair>(ready, before);
}

// The copy streams of each device, created on first use.
class StreamsOfDevices {
 public:
  explicit StreamsOfDevices(int64_t segment = 0) : segment_(segment) {}
  CopyStreams& operator[](c10::DeviceIndex device) {
    auto& streams = streams_[device];
    if (streams == nullptr) streams = std::make_unique<CopyStreams>(device, segment_);
    return *streams;
  }
  void release_staging(c10::DeviceIndex device) {
    if (const auto it = streams_.find(device); it != streams_.end()) it->second->staging.release();
  }

 private:
  const int64_t segment_;
  std::map<c10::DeviceIndex, std::unique_ptr<CopyStreams>> streams_;
};

// Memory from torch's allocator, for the device's current stream.
c10::Storage allocate_on(c10::Device device, int64_t bytes);

// Device memory for work on the stream; freed memory goes to the stream's later work.
c10::DataPtr scratch(c10::cuda::CUDAStream stream, size_t bytes);

// Copies between the device and pinned memory, all in one direction.
class PinnedCopies {
 public:
  explicit PinnedCopies(cudaMemcpyKind kind) : kind_(kind) {}
  // `whole`: the pinned memory is of a buffer that is in one piece; else the copy is cut where that may end.
  void add(void* to, const void* from, int64_t bytes, bool whole = false);
  // Starts those that were added since the last start; `together`: in any order, by one call where the runtime has it.
  void start(c10::cuda::CUDAStream stream, const char* what, bool together = false);

 private:
  cudaMemcpyKind kind_;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> bytes_;
};

// Tells torch's allocator that the stream uses the memory, so that after the last owner released it nobody gets it
// before the stream is done. Does nothing for the stream that the memory was allocated for.
void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream);

// Guards memory that a copy out reads while the program holds its storage, too: the program may free the memory by
// resize_, because a reference to a storage does not keep its memory. When torch's allocator reports the free, the
// memory's stream waits for the copy. (recordStream would delay the reuse of every moved tensor's memory until the host
// has seen the copy stream's work end.) `moved_on`: the stream that the memory was saved on.
void guard_source(const void* data, c10::cuda::CUDAStream moved_on, CudaEventPtr out);
// Ends the guard: the copy has ended, or the stream waits for it.
void release_source(const void* data, const CudaEventPtr& out);

// What both CUDA movers share.
class CudaMover : public Mover {
 public:
  bool moves(c10::Device device) const override { return device.is_cuda(); }
  bool asynchronous() const override { return true; }
  bool capturing(c10::Device device) const override { return capturing_stream(device); }
  EventPtr record(c10::Device device) override {
    if (!device.is_cuda()) return host_event();
    return offload::record_on(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  c10::Stream stream(c10::Device device) override {
    if (!device.is_cuda()) return Mover::stream(device);
    return c10::cuda::getCurrentCUDAStream(device.index()).unwrap();
  }
  EventPtr record_on(c10::Stream stream) override { return record_unless_captured(stream); }
  void used_on(const c10::Storage& storage, c10::Stream stream) override {
    if (stream.device().is_cuda()) offload::used_on(storage, c10::cuda::CUDAStream(stream));
  }
  c10::Storage allocate(c10::Device device, int64_t bytes) override { return allocate_on(device, bytes); }
};

// A pinned number that the device writes. Its memory is never returned to the system, and reused only after the write.
class PinnedNumber {
 public:
  // Throws NoHostMemory.
  explicit PinnedNumber(int64_t value);
  ~PinnedNumber();
  PinnedNumber(const PinnedNumber&) = delete;
  PinnedNumber& operator=(const PinnedNumber&) = delete;
  // Where the device writes. The caller passes the event behind the write to `written`; without it the memory is not
  // reused.
  int64_t* target() {
    wanted_ = true;
    return data_;
  }
  void written(CudaEventPtr by) { by_ = std::move(by); }
  const volatile int64_t* data() const { return data_; }

 private:
  int64_t* data_;
  bool wanted_ = false;
  CudaEventPtr by_;
};
// For Count::nonzeros.
inline std::shared_ptr<const volatile int64_t> value_of(std::shared_ptr<PinnedNumber> number) {
  const auto* const data = number->data();
  return {std::move(number), data};
}

}  // namespace weft::offload
