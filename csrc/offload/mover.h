// What moves bytes between a device and the host, as the ledger sees it. The ledger decides what moves and when; a
// mover knows streams, events, host memory and codecs.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "offload/host_pool.h"

namespace weft::offload {

// A moment: of a device's stream, or of the host's clock.
class Mark {
 public:
  virtual ~Mark() = default;
  virtual bool passed() const = 0;
  // Seconds from `earlier`, one of the same mover and device but no Later, to this one; both have passed.
  virtual double since(const Mark& earlier) const = 0;
};
using MarkPtr = std::shared_ptr<const Mark>;

// When both have passed.
class Later : public Mark {
 public:
  Later(MarkPtr a, MarkPtr b) : a_(std::move(a)), b_(std::move(b)) {}
  bool passed() const override { return a_->passed() && b_->passed(); }
  double since(const Mark& earlier) const override { return std::max(a_->since(earlier), b_->since(earlier)); }

 private:
  MarkPtr a_, b_;
};

enum class Codec : uint8_t { none, automatic, zvc, rle };

// Bytes [lo, hi) of a storage, elements of `dtype`.
struct Bytes {
  c10::Storage storage;
  int64_t lo, hi;
  at::ScalarType dtype;
  int64_t size() const { return hi - lo; }
};

// Non-zero elements of n: written by the device some time, n before.
struct Count {
  int64_t n = 0;
  std::shared_ptr<const volatile int64_t> nonzeros;
};

// Bytes on the bus, which of a compressed tensor only the device knows at first.
struct Sent {
  struct Part {
    Count count;
    int64_t least;  // elements that cross in any case
  };
  int64_t fixed = 0, itemsize = 0;
  std::vector<Part> parts;  // empty where nothing is compressed
  int64_t bytes() const {
    int64_t elements = 0;
    for (const Part& part : parts) elements += std::max<int64_t>(part.least, int64_t(*part.count.nonzeros));
    return fixed + itemsize * elements;
  }
};

// A range of bytes in host memory, or on its way there or back.
class Parcel {
 public:
  virtual ~Parcel() = default;
  // Whether the copy out has ended, as far as the host can tell without waiting.
  virtual bool is_out() = 0;
  // Lets the stream that the bytes were saved on wait for the copy out: what it does later may write over the source.
  virtual void wait_out() = 0;
  // Starts the copy back to `to`, which was allocated on the current stream and is as long as what went out. `now`: a
  // mark of that stream with no work after it, or null.
  virtual void start_in(const Bytes& to, const MarkPtr& now) = 0;
  // Whether the copy back has ended, as is_out.
  virtual bool is_in() = 0;
  // Lets the current stream, which is going to read `to`, wait for the copy back.
  virtual void wait_in(const c10::Storage& to) = 0;

  // Where the bytes always are, for a mover that moves pages and not addresses; else empty.
  virtual c10::Storage home() const { return {}; }

  Sent sent, returned;
  bool compressed = false;
  MarkPtr out_begin, out_end, in_begin, in_end;
};

class Mover {
 public:
  virtual ~Mover() = default;
  // Whether tensors of this device move at all.
  virtual bool moves(c10::Device device) const = 0;
  // Whether it can move this memory, on a device that it moves.
  virtual bool holds(const c10::Storage& storage) const { return true; }
  // False: every call returns when its work is done, and nothing is to be prefetched.
  virtual bool asynchronous() const = 0;
  // Whether the device's current stream is being captured: nothing may be queried, waited for or moved.
  virtual bool capturing(c10::Device device) const = 0;
  // Now, in the order of the device's current stream.
  virtual MarkPtr mark(c10::Device device) = 0;
  // Starts the copy out of bytes that were complete at `ready` on the current stream; null without host memory for it.
  // `density`: what their share of non-zeros is expected to be, 0 where nobody knows; `staging` says what it costs.
  virtual std::shared_ptr<Parcel> out(const Bytes& from, Codec codec, const MarkPtr& ready, double density) = 0;
  // Starts to count the elements that are not zero, by their bits; empty where the mover has no use for it.
  virtual Count count(const Bytes& bytes) = 0;
  // Device memory that the codec takes beside a tensor of that size on its way.
  virtual int64_t staging(int64_t bytes, int64_t itemsize, double density) const { return 0; }
  // Memory for `bytes` bytes from torch's allocator, for the current stream.
  virtual c10::Storage allocate(c10::Device device, int64_t bytes) = 0;
  // Host bytes held, most ever held; gives free ones back.
  virtual int64_t host_bytes() const = 0;
  virtual int64_t host_peak_bytes() const = 0;
  virtual int64_t release() = 0;
  virtual void close() = 0;
  // A use has ended: gives device memory back that only its copies needed.
  virtual void settle() {}
  // Bytes per second out and back, measured once in the process; zeros where there is no bus.
  virtual std::pair<double, double> rates(c10::DeviceIndex device) { return {0, 0}; }
  // Those of the copies out and back, and of codecs out and back, for tests that delay them.
  virtual std::vector<uintptr_t> streams(c10::DeviceIndex device) { return {}; }
};

// Whether the elements are of a type that the codecs know.
bool compressible(const Bytes& bytes);
bool compressible(at::ScalarType dtype);

// Whether the device's current stream is being captured into a graph.
bool capturing_stream(c10::Device device);
// Now, by the host's clock.
MarkPtr host_mark();

std::shared_ptr<Mover> make_reference_mover(int64_t pool_limit);
// Moves nothing: where there is no CUDA.
std::shared_ptr<Mover> make_idle_mover();
#ifdef WEFT_WITH_CUDA
std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec);
std::shared_ptr<Mover> make_managed_mover(int64_t pool_limit);
bool has_managed(int device);
// For tests and benchmarks: how much of a tensor the codec has on the device at a time, a multiple of 128 bytes, and
// the blocks of its kernels.
void set_stages(int64_t segment, int pack, int spread);
#endif

}  // namespace weft::offload
