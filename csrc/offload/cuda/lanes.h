// Streams, events, staging memory and pinned numbers of the movers on CUDA.
#pragma once
#include <c10/core/Storage.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/device.h"
#include "offload/mover.h"

namespace weft::offload {

// A point in a stream; events are reused. What waits for it waits for what had been recorded when it began to wait.
class CudaMark : public Mark {
 public:
  explicit CudaMark(c10::cuda::CUDAStream stream);
  ~CudaMark() override;
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;
  bool passed() const override;
  // Whether `passed` has said so: asks no device.
  bool seen() const { return passed_; }
  const void* stream() const override { return stream_; }
  // Nothing that the stream does from now on starts before this point.
  void hold(c10::cuda::CUDAStream stream) const;
  // Whether its stream had been told to wait for `other` when this mark was made, as far as that is remembered.
  bool is_behind(const CudaMark& other) const { return other.holder_ == stream_ && other.held_ < made_; }
  void synchronize() const;

 private:
  double elapsed(const Mark& earlier) const override;

  c10::DeviceIndex device_;
  cudaEvent_t event_;
  mutable bool passed_ = false;
  // By the order in which marks are made and streams told to wait.
  const void* stream_;
  int64_t made_;
  mutable const void* holder_ = this;  // the stream that was told last to wait for it; at first none
  mutable int64_t held_ = 0;
};
using CudaMarkPtr = std::shared_ptr<const CudaMark>;

inline CudaMarkPtr mark_on(c10::cuda::CUDAStream stream) {
  return std::make_shared<CudaMark>(stream);
}

// CudaMark::hold, of a mark that may be both of two.
void hold(const Mark& mark, c10::cuda::CUDAStream stream);

// A mark of a stream of any device; null where the stream is captured.
MarkPtr mark_unless_captured(c10::Stream stream);

// Device memory that a copy and a codec hand each other, in turns: who writes to a slot waits for who read it last.
// Belongs to a stream, by which torch's allocator knows when it is free for others.
class Staging {
 public:
  static constexpr int kSlots = 3;
  struct Slot {
    c10::DataPtr memory;
    CudaMarkPtr read;  // or made, where nobody has read it
    char* data() const { return static_cast<char*>(memory.get()); }
  };

  explicit Staging(c10::cuda::CUDAStream stream) : stream_(stream) {}
  ~Staging();
  // Lets every slot have so many bytes.
  void reserve(int64_t bytes);
  // The next slot, for `writer` to write to.
  Slot& next(c10::cuda::CUDAStream writer);
  void release();

 private:
  c10::cuda::CUDAStream stream_;
  std::array<Slot, kSlots> slots_;
  int64_t bytes_ = 0;
  unsigned turn_ = 0;
};

// The streams of one device: copies out to the host and back in, and beside each what a codec computes before and after
// them, so that the bus has no rest while it does. Of high priority: what little a codec computes must not queue behind
// the operations that wait for it.
struct Lanes {
  Lanes(c10::DeviceIndex device, int64_t segment)
      : segment(segment),
        out(c10::cuda::getStreamFromPool(true, device)),
        in(c10::cuda::getStreamFromPool(true, device)),
        pack(c10::cuda::getStreamFromPool(true, device)),
        spread(c10::cuda::getStreamFromPool(true, device)),
        staging(pack) {}
  const int64_t segment;  // bytes of a tensor that the codec has in the staging memory at a time
  c10::cuda::CUDAStream out, in, pack, spread;
  Staging staging;
  MarkPtr last_out, last_in;  // ends of the latest copies
  int64_t outs = 0;           // copies out so far
  // Which of them each stream waits for by now, the last one.
  int64_t& waited(c10::cuda::CUDAStream stream) {
    for (auto& [held, last] : waited_)
      if (held == stream) return last;
    return waited_.emplace_back(stream, 0).second;
  }

 private:
  std::vector<std::pair<c10::cuda::CUDAStream, int64_t>> waited_;
};

// When a copy begins that waits for `ready` and for the copy before it on its lane.
inline MarkPtr begin_of(const MarkPtr& ready, const MarkPtr& before) {
  return before == nullptr ? ready : std::make_shared<Later>(ready, before);
}

// Of a device, made when they are first asked for.
class LanesOf {
 public:
  explicit LanesOf(int64_t segment = 0) : segment_(segment) {}
  Lanes& operator[](c10::DeviceIndex device) {
    auto& lanes = lanes_[device];
    if (lanes == nullptr) lanes = std::make_unique<Lanes>(device, segment_);
    return *lanes;
  }
  void release_staging(c10::DeviceIndex device) {
    if (const auto it = lanes_.find(device); it != lanes_.end()) it->second->staging.release();
  }

 private:
  const int64_t segment_;
  std::map<c10::DeviceIndex, std::unique_ptr<Lanes>> lanes_;
};

// Memory for `bytes` bytes from torch's allocator, for the device's current stream.
c10::Storage allocate_on(c10::Device device, int64_t bytes);

// Device memory for a kernel on a stream, free for what the stream does next.
c10::DataPtr scratch(c10::cuda::CUDAStream stream, size_t bytes);

// The stream that the memory was saved or allocated on may not be the one it was allocated for: its allocator has to
// know, or it gives the memory to work that is not behind ours. Does nothing where they are the same.
void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream);

// What CUDA's movers say of devices, streams and memory.
class CudaMover : public Mover {
 public:
  bool moves(c10::Device device) const override { return device.is_cuda(); }
  bool asynchronous() const override { return true; }
  bool capturing(c10::Device device) const override { return capturing_stream(device); }
  MarkPtr mark(c10::Device device) override {
    if (!device.is_cuda()) return host_mark();
    return offload::mark_on(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  c10::Stream stream(c10::Device device) override {
    if (!device.is_cuda()) return Mover::stream(device);
    return c10::cuda::getCurrentCUDAStream(device.index()).unwrap();
  }
  MarkPtr mark_on(c10::Stream stream) override { return mark_unless_captured(stream); }
  void used_on(const c10::Storage& storage, c10::Stream stream) override {
    if (stream.device().is_cuda()) offload::used_on(storage, c10::cuda::CUDAStream(stream));
  }
  c10::Storage allocate(c10::Device device, int64_t bytes) override { return allocate_on(device, bytes); }
};

// A pinned number that the device writes to. Its memory is never given back to the system, and to another number only
// when what writes to it has run.
class PinnedNumber {
 public:
  // Throws NoHostMemory.
  explicit PinnedNumber(int64_t value);
  ~PinnedNumber();
  PinnedNumber(const PinnedNumber&) = delete;
  PinnedNumber& operator=(const PinnedNumber&) = delete;
  // Where the device writes to; the caller says by `written` when it has, or the memory is given to nobody.
  int64_t* target() {
    wanted_ = true;
    return data_;
  }
  void written(CudaMarkPtr by) { by_ = std::move(by); }
  const volatile int64_t* data() const { return data_; }

 private:
  int64_t* data_;
  bool wanted_ = false;
  CudaMarkPtr by_;
};
// As a Count has it.
inline std::shared_ptr<const volatile int64_t> value_of(std::shared_ptr<PinnedNumber> number) {
  const auto* const data = number->data();
  return {std::move(number), data};
}

}  // namespace weft::offload
