// What moves bytes between a device and the host. The tracker decides what moves and when; a mover knows streams,
// events, host memory and codecs.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "offload/transfer/event.h"
#include "offload/transfer/host_pool.h"

namespace weft::offload {

// The system refuses host memory that the engine cannot do without.
struct NoHostMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// For tests: how many of the next allocations fail, of host memory and of device memory for restored tensors and the
// codec.
struct Refusals {
  std::atomic<int64_t> host = 0, device = 0;
};
Refusals& refusals();
// Whether this allocation fails; counts it.
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

// The number of non-zero elements among n. The device writes it at some time; it is n before.
struct Count {
  int64_t n = 0;
  std::shared_ptr<const volatile int64_t> nonzeros;
};

// Bytes on the bus. Of a compressed tensor only the device knows them at first.
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
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Whether the host knows that the copy out has ended. `ask`: asks the device if needed; else the answer may be late,
  // and it is enough that the stream that the bytes were moved on waits for it already.
  virtual bool is_out(bool ask) = 0;
  // Makes the stream that the bytes were moved on wait for the copy out: its later work may overwrite the source.
  virtual void wait_out() = 0;
  // Starts the copy back to `to`, which was allocated on the current stream and has the size of what went out. `now`:
  // an event of that stream with no work after it, or null.
  virtual void start_in(const Bytes& to, const EventPtr& now) = 0;
  // Makes the current stream, which is going to read `to`, wait for the copy back.
  virtual void wait_in(const c10::Storage& to) = 0;
  // Whether the current stream is known to be behind the copy back: then a wait for it enqueues nothing.
  virtual bool arrived() const { return false; }

  // Where the bytes always are, for a mover that moves pages and not addresses; else empty.
  virtual c10::Storage home() const { return {}; }

  Sent sent, returned;
  bool compressed = false;
  // Begin and end of each copy on the bus; `here`: when the restored bytes can be read.
  EventPtr out_begin, out_end, in_begin, in_end, here;
};

class Mover {
 public:
  virtual ~Mover() = default;
  // Whether tensors of this device move at all.
  virtual bool moves(c10::Device device) const = 0;
  // Whether it can move this memory, on a device that it moves.
  virtual bool holds(const c10::Storage& storage) const { return true; }
  // False: every call returns when its work is done, and nothing is prefetched.
  virtual bool asynchronous() const = 0;
  // Whether the device's current stream is being captured: nothing may be queried, waited for or moved.
  virtual bool capturing(c10::Device device) const = 0;
  // Records an event on the device's current stream.
  virtual EventPtr record(c10::Device device) = 0;
  // The device's current stream.
  virtual c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
  // Records an event on that stream; null while it is captured.
  virtual EventPtr record_on(c10::Stream stream) { return record(stream.device()); }
  // Tells the memory's allocator that the stream may still use it when its last owner releases it.
  virtual void used_on(const c10::Storage& storage, c10::Stream stream) {}
  // Starts the copy out of bytes that are complete at `ready` on the current stream; null without host memory.
  // `density`: expected share of non-zeros, 0 where unknown; `staging` gives its cost. `share`: the share of the bytes,
  // from the first on, that Codec::zvc compresses; the rest crosses uncompressed.
  virtual std::shared_ptr<Transfer> out(const Bytes& from, Codec codec, const EventPtr& ready, double density,
                                        double share) = 0;
  // Whether several uncompressed copies of one direction can share the event of their end.
  virtual bool joins() const { return false; }
  // Copies that are started between these two calls share it: what a Transfer says of its end, and whoever waits for
  // it, comes after the second.
  virtual void begin_joint() {}
  virtual void end_joint() {}
  // Starts to count the elements that have any bit set; empty where the mover has no use for it.
  virtual Count count(const Bytes& bytes) = 0;
  // Device memory that the codec needs beside a tensor of that size in transfer.
  virtual int64_t staging(int64_t bytes, int64_t itemsize, double density) const { return 0; }
  // Memory from torch's allocator, for the current stream.
  virtual c10::Storage allocate(c10::Device device, int64_t bytes) = 0;
  // For tensors that are going to move, (bytes, itemsize) each: the sizes of host memory that is still missing. What
  // allocate_host allocates, on any thread and without Python's lock, keep_host takes in.
  virtual std::vector<int64_t> missing_host(const std::vector<std::pair<int64_t, int64_t>>& tensors) const {
    return {};
  }
  // `rest` is called after every few milliseconds in which others may have waited for the driver, with their number of
  // seconds; it returns once `allocate_host` may go on, or false to give up.
  virtual void* allocate_host(c10::DeviceIndex device, int64_t bytes, const std::function<bool(double)>& rest) const {
    return nullptr;
  }
  virtual void keep_host(void* data, int64_t bytes) {}
  // Host bytes held now, and most ever held; release gives free ones back to the system.
  virtual int64_t host_bytes() const = 0;
  virtual int64_t host_peak_bytes() const = 0;
  virtual int64_t release() = 0;
  virtual void close() = 0;
  // How often `out` or `count` had to ask the system for host memory so far.
  virtual int64_t host_allocations() const { return 0; }
  // Frees the codec's device memory; the next copy allocates it again.
  virtual void settle(c10::Device device) {}
  // Bytes per second out and back, measured once per process; zeros without a bus, or without memory to measure with.
  // On any thread, without Python's lock.
  virtual std::pair<double, double> rates(c10::DeviceIndex device) { return {0, 0}; }
  // Bytes per second that the codec reads and writes, approximately; 0 where it does not run or nothing is known.
  virtual double codec_rate(c10::DeviceIndex device) const { return 0; }
  // The streams of copies out and in and of compression and decompression, for tests that delay them.
  virtual std::vector<uintptr_t> streams(c10::DeviceIndex device) { return {}; }
};

// Whether the codecs know the element type, and the bytes are whole elements.
bool compressible(const Bytes& bytes);
bool compressible(at::ScalarType dtype);

// Whether the device's current stream is being captured into a graph.
bool capturing_stream(c10::Device device);

std::shared_ptr<Mover> make_reference_mover(int64_t pool_limit);
// Moves nothing: where there is no CUDA.
std::shared_ptr<Mover> make_idle_mover();
#ifdef WEFT_WITH_CUDA
std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec, std::optional<int64_t> budget);
std::shared_ptr<Mover> make_managed_mover(int64_t pool_limit);
bool has_managed(int device);
// For tests and benchmarks, for movers made from now on: bytes of a tensor that the codecs stage at a time, a multiple
// of 128 or 0 for what fits the budget, and the blocks of their kernels.
void set_stages(int64_t segment, int compress, int decompress);
#endif

}  // namespace weft::offload
