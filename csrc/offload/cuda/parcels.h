// Ranges of bytes on their way to the host and back: as they are, and as each codec has them.
//
// What waits for what. A copy out waits for the save (what made the bytes) and for the last copy that used its host
// buffer; the source is kept until the ledger has seen the copy end or has let the stream of the save wait for it. A
// copy in waits for its own copy out and for everything that the stream which allocated its destination had to do
// before: torch's allocator may have given it memory whose last user is still running there. The reader's stream waits
// for the copy in. No stream of the program's but that of the reader or of the save ever waits for the bus, the host
// for nothing; the lanes of the codec wait for their ring of staging memory, which both ways share.
//
// A parcel allocates what it needs before it starts anything, so that nothing is on its way when there is no memory.
#pragma once
#include <optional>

#include "offload/cuda/lanes.h"

namespace weft::offload {

// Of the codec between a tensor and the copy engine.
struct Stages {
  // Bytes of a tensor that are staged at a time; 0: by the budget.
  int64_t segment = 0;
  // Most blocks of the kernels before a copy and after one; 0 for what fills the device: what computes beside them
  // loses less to a short burst than to a few blocks that hold their place for long.
  int pack = 0, spread = 0;
};
Stages& stages();

// On the lanes of its device; how the bytes cross the bus is up to `send` and `receive`.
class LaneParcel : public Parcel {
 public:
  void start_out(const Bytes& from, MarkPtr ready);
  bool is_out(bool ask) override { return ask ? out_->passed() : out_->seen(); }
  void wait_out() override;

  void start_in(const Bytes& to, const MarkPtr& now) override;
  void wait_in(const c10::Storage& to) override;

 protected:
  LaneParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from);
  // Starts the work, the last of it on the out lane, or on the stream that receive returns. What is enqueued on the
  // first stream comes after what has to be waited for.
  virtual c10::cuda::CUDAStream first_out() const { return lanes_.out; }
  virtual void send(const char* from, int64_t bytes) = 0;
  virtual c10::cuda::CUDAStream receive(char* to, int64_t bytes) = 0;

  char* host() const { return static_cast<char*>(buffer_->data()); }

  Lanes& lanes_;
  std::vector<std::shared_ptr<PinnedNumber>> numbers_;  // that the copy out writes to

 private:
  std::unique_ptr<HostPool::Buffer> buffer_;
  c10::cuda::CUDAStream moved_on_;
  int64_t number_ = 0;  // among the copies out of the lane
  std::optional<c10::cuda::CUDAStream> allocated_on_;
  CudaMarkPtr out_, in_;
};

class RawParcel : public LaneParcel {
 public:
  RawParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density, double share);

 private:
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;
};

// Zero-value compression, by segments that a codec and the copy engine hand each other on the device. No size has to be
// known before: as many values as are expected cross with the mask by the copy engine, which takes nothing from the
// compute beside it; the codec's kernels themselves write those beyond to the host, and read them from there. Where
// nothing is expected that are all of them. Host memory of a segment: its mask, then room for all elements. What is not
// to be compressed crosses in one copy, first out and last back, and lies behind the segments.
class ZvcParcel : public LaneParcel {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize);
  static int64_t staging(int64_t n, int64_t itemsize, double density, int64_t segment);
  // At least one element of that share is compressed.
  ZvcParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density, double share);

 private:
  struct Segment {
    int64_t first, n, expected;  // elements
    PinnedNumber* nonzeros;
  };
  // What is not compressed.
  struct Rest {
    int64_t first, bytes;
  };
  bool staged() const { return segments_.front().expected > 0; }
  int64_t staged_bytes(const Segment& segment) const;
  uint32_t* mask(const Segment& segment) const;
  char* values(const Segment& segment) const;
  char* rest() const;
  c10::cuda::CUDAStream first_out() const override { return staged() ? lanes_.pack : lanes_.out; }
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;

  int64_t itemsize_;
  std::vector<Segment> segments_;
  Rest rest_;
};

// Run lengths beside the same values. The list of runs has its longest length on the bus, since only the device knows
// how many there are: for comparison, not for speed.
class RleParcel : public LaneParcel {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize);
  static int64_t staging(int64_t n, int64_t itemsize);
  RleParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density, double share);

 private:
  int32_t* runs() const;
  char* values() const;
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;

  int64_t n_, itemsize_;
};

}  // namespace weft::offload
