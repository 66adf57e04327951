// What moves bytes between a device and the host, as the ledger sees it. The ledger decides what moves and when; a
// mover knows streams, events, host memory and codecs.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "offload/host_pool.h"

namespace weft::offload {

class Mark;
using MarkPtr = std::shared_ptr<const Mark>;

// A moment: of a device's stream, or of the host's clock; or when two of them have passed.
class Mark {
 public:
  struct Pair {
    MarkPtr a, b;
  };
  virtual ~Mark() = default;
  virtual bool passed() const = 0;
  // Of two of one stream, that which was made last passes last.
  virtual const void* stream() const { return nullptr; }
  // Null of a moment by itself.
  virtual const Pair* both() const { return nullptr; }
  // Seconds from `earlier`, one of the same mover and device, to this one; both have passed.
  double since(const Mark& earlier) const {
    if (const Pair* own = both()) return std::max(own->a->since(earlier), own->b->since(earlier));
    if (const Pair* its = earlier.both()) return std::min(since(*its->a), since(*its->b));
    return elapsed(earlier);
  }

 protected:
  // The same of two moments by themselves.
  virtual double elapsed(const Mark& earlier) const = 0;
};

// When both have passed. What a stream waits for needs no mark of its own behind the wait: it goes on at the later of
// its mark before the wait and of what it waits for.
class Later : public Mark {
 public:
  Later(MarkPtr a, MarkPtr b) : pair_{std::move(a), std::move(b)} {}
  bool passed() const override { return pair_.a->passed() && pair_.b->passed(); }
  const Pair* both() const override { return &pair_; }

 private:
  double elapsed(const Mark&) const override { return 0; }  // nobody asks

  const Pair pair_;
};

// What the system does not give, and the engine cannot do without.
struct NoHostMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For tests: how many of the next allocations of host memory, and of device memory for what comes back or for the
// codec, are refused.
struct Refusals {
  std::atomic<int64_t> host = 0, device = 0;
};
Refusals& refusals();
// Whether this one is.
inline bool refused(std::atomic<int64_t>& left) {
  return left.load(std::memory_order_relaxed) > 0 && left.fetch_sub(1) > 0;
}

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
  // Whether the copy out has ended, as far as the host can tell without waiting; `ask`: the device, too, and not only
  // what it has said before.
  virtual bool is_out(bool ask) = 0;
  // Lets the stream that the bytes were moved on wait for the copy out: what it does later may write over the source.
  virtual void wait_out() = 0;
  // Starts the copy back to `to`, which was allocated on the current stream and is as long as what went out. `now`: a
  // mark of that stream with no work after it, or null.
  virtual void start_in(const Bytes& to, const MarkPtr& now) = 0;
  // Lets the current stream, which is going to read `to`, wait for the copy back.
  virtual void wait_in(const c10::Storage& to) = 0;

  // Where the bytes always are, for a mover that moves pages and not addresses; else empty.
  virtual c10::Storage home() const { return {}; }

  Sent sent, returned;
  bool compressed = false;
  // Of the copies on the bus; `here`: from when on what came back can be read.
  MarkPtr out_begin, out_end, in_begin, in_end, here;
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
  // The device's current stream, by which `mark_on` gives a mark of it later; null of it while it is captured.
  virtual c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
  virtual MarkPtr mark_on(c10::Stream stream) { return mark(stream.device()); }
  // The stream may be at work with the memory when its last owner lets go of it.
  virtual void used_on(const c10::Storage& storage, c10::Stream stream) {}
  // Starts the copy out of bytes that were complete at `ready` on the current stream; null without host memory for it.
  // `density`: what their share of non-zeros is expected to be, 0 where nobody knows; `staging` says what it costs.
  // `share`: how much of them Codec::zvc compresses, from the first on; the rest goes as it is.
  virtual std::shared_ptr<Parcel> out(const Bytes& from, Codec codec, const MarkPtr& ready, double density,
                                      double share) = 0;
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
  // Whether `out` or `count` had to ask the system for host memory: how often so far.
  virtual int64_t host_allocations() const { return 0; }
  // Gives the codec's memory on the device back, which the next copy asks for again.
  virtual void settle(c10::Device device) {}
  // Bytes per second out and back, measured once in the process; zeros where there is no bus, or no memory now to
  // measure.
  virtual std::pair<double, double> rates(c10::DeviceIndex device) { return {0, 0}; }
  // Bytes per second that the codec reads and writes, about; 0 where it does not run or nobody knows.
  virtual double codec_rate(c10::DeviceIndex device) const { return 0; }
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
std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec, std::optional<int64_t> budget);
std::shared_ptr<Mover> make_managed_mover(int64_t pool_limit);
bool has_managed(int device);
// For tests and benchmarks: how much of a tensor the codecs of movers made from now on have on the device at a time, a
// multiple of 128 bytes or 0 for what fits the budget, and the blocks of their kernels.
void set_stages(int64_t segment, int pack, int spread);
#endif

}  // namespace weft::offload
