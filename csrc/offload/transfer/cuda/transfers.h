// The transfers of the copy mover: uncompressed, and one class per codec.
//
// Waits. A copy out waits for the save, which completes the bytes, and for the last copy that used its host buffer. The
// source is kept until the tracker has seen the copy end or has made the stream of the save wait for it. A copy in
// waits for its own copy out and for all earlier work of the stream that allocated its destination: torch's allocator
// may have given it memory whose last user still runs there. The reader's stream waits for the copy in. Of the
// program's streams only those of the save and of the read ever wait for the bus, and the host never waits. The codec's
// streams wait for the ring of staging memory, which both directions share.
//
// A transfer allocates all that it needs before it starts any work: out of memory leaves nothing running.
#pragma once
#include <optional>

#include "offload/transfer/cuda/copy_streams.h"
#include "offload/transfer/cuda/pinned.h"

namespace weft::offload {

// How the codec stages a tensor.
struct Stages {
  // Bytes of a tensor that are staged at a time; 0: derived from the budget.
  int64_t segment = 0;
  // Most blocks of the kernels that compress and decompress; 0: as many as fill the device. A short burst slows the
  // compute beside it less than a few blocks that occupy their SMs for long.
  int compress = 0, decompress = 0;
};
Stages& stages();

class CopyTransfer;

// In errors.
constexpr const char* kCopyOut = "copy of a saved tensor to the host";
constexpr const char* kCopyIn = "copy of a saved tensor back from the host";

// Copies of one direction and device that start together and share the event of their end.
struct Joint {
  bool open = false;
  std::vector<CopyTransfer*> outs, ins;
  PinnedCopies out{cudaMemcpyDeviceToHost}, in{cudaMemcpyHostToDevice};
};

// A transfer on the copy streams of its device. `send` and `receive` define how the bytes cross the bus.
class CopyTransfer : public Transfer {
 public:
  ~CopyTransfer() override { release_out(); }
  // Its end is recorded at once, or, where the joint is open and may be joined, when that ends.
  void start_out(const Bytes& from, EventPtr ready, Joint& joint);
  // The event was recorded on the copy stream behind this copy; `number` counts such events of that stream.
  void end_out(CudaEventPtr end, int64_t number);
  void end_in(CudaEventPtr end, int64_t number);
  bool is_out(bool ask) override;
  void wait_out() override;

  void start_in(const Bytes& to, const EventPtr& now) override;
  void wait_in(const c10::Storage& to) override;
  bool arrived() const override;

  CopyStreams& streams() const { return streams_; }

 protected:
  CopyTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from);
  // `send` enqueues first on first_out(), which already waits for what a copy out waits for, and last on the out
  // stream. `receive` returns the stream of its last work. Who joins adds to an open joint in place of that.
  virtual c10::cuda::CUDAStream first_out() const { return streams_.out; }
  virtual void send(const char* from, int64_t bytes) = 0;
  virtual c10::cuda::CUDAStream receive(char* to, int64_t bytes) = 0;
  // Whether all of its work is on the copy streams.
  virtual bool joins() const { return false; }

  char* host() const { return static_cast<char*>(buffer_->data()); }
  // Whether that is in one piece.
  bool whole() const { return buffer_->bytes() < kPinnedWhole; }

  CopyStreams& streams_;
  Joint* joint_ = nullptr;
  std::vector<std::shared_ptr<PinnedNumber>> numbers_;  // that the copy out writes to

 private:
  void release_out();  // nothing needs to wait for the copy out any more
  // Whether the stream waits for the copy back already.
  bool is_behind(c10::cuda::CUDAStream stream) const {
    return number_in_ > 0 && streams_.waited(stream).in >= number_in_;
  }
  void make_wait_in(c10::cuda::CUDAStream stream);

  std::unique_ptr<HostPool::Buffer> buffer_;
  const void* source_ = nullptr;  // the first byte of the guarded storage
  c10::cuda::CUDAStream moved_on_;
  int64_t number_ = 0, number_in_ = 0;  // of the events of its ends, among those of their streams; 0: on another one
  std::optional<c10::cuda::CUDAStream> allocated_on_;
  CudaEventPtr out_, in_;
};

class RawTransfer : public CopyTransfer {
 public:
  RawTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density,
              double share);

 private:
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;
  bool joins() const override { return true; }
};

// Zero-value compression, by segments that pass through staging memory between the codec and the copy engine. No size
// needs to be known in advance: the copy engine, which takes nothing from compute, carries the mask and the expected
// number of values; the codec's kernels write any further values to the host, and read them from there. Where nothing
// is expected, the kernels carry all. Host memory of a segment: its mask, then room for all elements. The share that is
// not compressed crosses in one copy, first out and last back, and lies behind the segments.
class ZvcTransfer : public CopyTransfer {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize);
  static int64_t staging(int64_t n, int64_t itemsize, double density, int64_t segment);
  // At least one element of that share is compressed.
  ZvcTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density,
              double share);

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
  c10::cuda::CUDAStream first_out() const override { return staged() ? streams_.compress : streams_.out; }
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;

  int64_t itemsize_;
  std::vector<Segment> segments_;
  Rest rest_;
};

// Run lengths in place of the mask. The list of runs crosses the bus at its maximal length, since only the device knows
// its actual length: for comparison, not for speed.
class RleTransfer : public CopyTransfer {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize);
  static int64_t staging(int64_t n, int64_t itemsize);
  RleTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density,
              double share);

 private:
  int32_t* runs() const;
  char* values() const;
  void send(const char* from, int64_t bytes) override;
  c10::cuda::CUDAStream receive(char* to, int64_t bytes) override;

  int64_t n_, itemsize_;
};

}  // namespace weft::offload
