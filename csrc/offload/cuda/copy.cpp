// The mover "copy": pinned host memory, a stream per direction, events.
//
// What waits for what. A copy out waits for the save (what made the bytes) and for the last copy that used its host
// buffer; the source is kept until the ledger has seen the copy end or has let the stream of the save wait for it. A
// copy in waits for its own copy out and for everything that the stream which allocated its destination had to do
// before: torch's allocator may have given it memory whose last user is still running there. The reader's stream waits
// for the copy in. No stream but that of the reader or of the save ever waits for the bus, the host for nothing.
#include "offload/cuda/copy.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "common/integers.h"
#include "offload/cuda/pinned.h"
#include "offload/cuda/rle_compress.h"
#include "offload/cuda/zvc_compress.h"

namespace weft::offload {
namespace {

// Events of each device that nobody uses. Never freed: the process may end after the driver did.
struct Events {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<cudaEvent_t>> free;
};
Events& events() {
  static Events* all = new Events;
  return *all;
}

}  // namespace

CudaMark::CudaMark(c10::cuda::CUDAStream stream) : device_(stream.device_index()), event_(nullptr) {
  const c10::cuda::CUDAGuard guard(device_);
  {
    const std::lock_guard lock(events().mutex);
    auto& free = events().free[device_];
    if (!free.empty()) {
      event_ = free.back();
      free.pop_back();
    }
  }
  if (event_ == nullptr) cuda_check(cudaEventCreate(&event_), "cudaEventCreate");
  cuda_check(cudaEventRecord(event_, stream.stream()), "cudaEventRecord");
}

CudaMark::~CudaMark() {
  const std::lock_guard lock(events().mutex);
  events().free[device_].push_back(event_);
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

double CudaMark::since(const Mark& earlier) const {
  float ms = 0;
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cuda_check(cudaEventElapsedTime(&ms, static_cast<const CudaMark&>(earlier).event_, event_), "cudaEventElapsedTime");
  return 1e-3 * double(ms);
}

void CudaMark::hold(c10::cuda::CUDAStream stream) const {
  const c10::cuda::CUDAGuard guard(stream.device_index());
  cuda_check(cudaStreamWaitEvent(stream.stream(), event_, 0), "cudaStreamWaitEvent");
}

void CudaMark::synchronize() const {
  if (!passed_) cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  passed_ = true;
}

c10::Storage allocate_on(c10::Device device, int64_t bytes) {
  const c10::cuda::CUDAGuard guard(device.index());
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  return c10::Storage(c10::Storage::use_byte_size_t(), size_t(bytes), allocator->allocate(size_t(bytes)), allocator,
                      /*resizable=*/false);
}

void used_on(const c10::Storage& storage, c10::cuda::CUDAStream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(storage.data_ptr(), stream);
}

bool capturing_stream(c10::Device device) {
  if (!device.is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

namespace {

CudaMarkPtr mark_on(c10::cuda::CUDAStream stream) {
  return std::make_shared<CudaMark>(stream);
}
char* address(const c10::Storage& storage) {
  return static_cast<char*>(storage.mutable_data());
}

// A range of bytes on the lanes of its device; how they cross the bus is up to `send` and `receive`.
class LaneParcel : public Parcel {
 public:
  LaneParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from)
      : lanes_(lanes),
        buffer_(std::move(buffer)),
        saved_on_(c10::cuda::getCurrentCUDAStream(from.storage.device().index())) {}

  void start_out(const Bytes& from, CudaMarkPtr ready) {
    used_on(from.storage, saved_on_);
    if (ready == nullptr) ready = mark_on(saved_on_);
    ready->hold(lanes_.out);
    if (buffer_->busy != nullptr) std::static_pointer_cast<const CudaMark>(buffer_->busy)->hold(lanes_.out);
    out_begin = begin_of(ready, lanes_.last_out);
    send(address(from.storage) + from.lo, from.size());
    lanes_.last_out = out_end = out_ = mark_on(lanes_.out);
    buffer_->busy = std::const_pointer_cast<CudaMark>(out_);
  }

  bool is_out() override { return out_->passed(); }
  void wait_out() override { out_->hold(saved_on_); }

  bool is_in() override { return in_->passed(); }
  void start_in(const Bytes& to, const MarkPtr& now) override {
    const c10::cuda::CUDAGuard guard(to.storage.device().index());
    allocated_on_ = c10::cuda::getCurrentCUDAStream(to.storage.device().index());
    const auto ready = now != nullptr ? std::static_pointer_cast<const CudaMark>(now) : mark_on(*allocated_on_);
    ready->hold(lanes_.in);
    if (!out_->passed()) out_->hold(lanes_.in);
    in_begin = begin_of(ready, lanes_.last_in);
    receive(address(to.storage) + to.lo, to.size());
    lanes_.last_in = in_end = in_ = mark_on(lanes_.in);
    buffer_->busy = std::const_pointer_cast<CudaMark>(in_);
  }

  void wait_in(const c10::Storage& to) override {
    const auto stream = c10::cuda::getCurrentCUDAStream(to.device().index());
    if (!in_->passed()) in_->hold(stream);
    if (stream == *allocated_on_) return;
    if (!in_->passed()) in_->hold(*allocated_on_);
    used_on(to, stream);
  }

 protected:
  virtual void send(const char* from, int64_t bytes) = 0;
  virtual void receive(char* to, int64_t bytes) = 0;

  Lanes& lanes_;
  std::unique_ptr<HostPool::Buffer> buffer_;

 private:
  c10::cuda::CUDAStream saved_on_;
  std::optional<c10::cuda::CUDAStream> allocated_on_;
  CudaMarkPtr out_, in_;
};

class RawParcel : public LaneParcel {
 public:
  RawParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double)
      : LaneParcel(lanes, std::move(buffer), from) {
    sent.fixed = returned.fixed = from.size();
  }

 private:
  void send(const char* from, int64_t bytes) override {
    cuda_check(cudaMemcpyAsync(buffer_->data(), from, size_t(bytes), cudaMemcpyDeviceToHost, lanes_.out.stream()),
               "copy of a saved tensor to the host");
  }
  void receive(char* to, int64_t bytes) override {
    cuda_check(cudaMemcpyAsync(to, buffer_->data(), size_t(bytes), cudaMemcpyHostToDevice, lanes_.in.stream()),
               "copy of a saved tensor back from the host");
  }
};

// As soon as nobody uses it.
void free_buffer(void* data, const std::shared_ptr<void>& busy) {
  if (busy != nullptr) {
    try {
      std::static_pointer_cast<const CudaMark>(busy)->synchronize();
    } catch (...) {  // the device is gone, and nobody writes any more
    }
  }
  free_pinned(data);
}

// Pinned numbers that the device writes: how many elements are not zero. Never given back to the system.
class Numbers {
 public:
  static std::shared_ptr<int64_t> take(int64_t value) {
    static Numbers* all = new Numbers;
    const std::lock_guard lock(all->mutex_);
    if (all->free_.empty()) {
      void* const data = allocate_pinned(4096);
      if (data == nullptr) throw std::runtime_error("offload: the system refuses 4096 bytes of pinned host memory");
      for (int64_t* p = static_cast<int64_t*>(data); p < static_cast<int64_t*>(data) + 512; ++p)
        all->free_.push_back(p);
    }
    int64_t* p = all->free_.back();
    all->free_.pop_back();
    *p = value;
    return {p, [](int64_t* number) {
              const std::lock_guard lock(all->mutex_);
              all->free_.push_back(number);
            }};
  }

 private:
  std::mutex mutex_;
  std::vector<int64_t*> free_;
};

// Device memory for a kernel on a stream, free for what the stream does next.
c10::DataPtr scratch(c10::cuda::CUDAStream stream, size_t bytes) {
  const c10::cuda::CUDAStreamGuard guard(stream);
  return c10::cuda::CUDACachingAllocator::get()->allocate(std::max<size_t>(bytes, 16));
}

// Of kernels that use host memory: enough to fill the bus beside compute, which each of them slows down.
constexpr int kBlocksOut = 12, kBlocksIn = 16;

int64_t mask_bytes(int64_t n) {
  return 4 * ceil_div(n, 32);
}

// Compressed by a kernel that writes straight to the host: no size has to be known before, and nothing is staged. Host
// memory: the mask, then room for all elements. Back by the copy engine, as many elements as are expected, and spread
// from there on the device, which takes next to no time; those beyond are read from the host by the kernel.
class ZvcParcel : public LaneParcel {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize) { return mask_bytes(n) + n * itemsize; }
  static int64_t staging(int64_t n, int64_t itemsize, double density) {
    const size_t out = zvc_compress_workspace({nullptr, n, int(itemsize), nullptr, nullptr, n, nullptr});
    const size_t in = zvc_decompress_workspace({nullptr, nullptr, n, nullptr, n, int(itemsize)});
    return mask_bytes(n) + expected(n, density) * itemsize + int64_t(out + in);
  }

  ZvcParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density)
      : LaneParcel(lanes, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
    n_ = from.size() / itemsize_;
    expected_ = expected(n_, density);
    nonzeros_ = Numbers::take(n_);
    sent = returned = {mask_bytes(n_), itemsize_, {n_, nonzeros_}};
    returned.least = expected_;
    compressed = true;
  }

 private:
  // With a little more than what was counted the last time: activations drift.
  static int64_t expected(int64_t n, double density) {
    return density > 0 ? std::min(n, int64_t(1.01 * density * double(n)) + 4096) : 0;
  }
  uint32_t* mask() const { return static_cast<uint32_t*>(buffer_->data()); }
  char* values() const { return static_cast<char*>(buffer_->data()) + mask_bytes(n_); }

  void send(const char* from, int64_t) override {
    const ZvcCompress args{from, n_, int(itemsize_), mask(), values(), n_, nonzeros_.get()};
    const c10::DataPtr workspace = scratch(lanes_.out, zvc_compress_workspace(args));
    zvc_compress(args, workspace.get(), kBlocksOut, lanes_.out.stream());
  }

  void receive(char* to, int64_t) override {
    const auto stream = lanes_.in.stream();
    const int64_t bytes = mask_bytes(n_) + expected_ * itemsize_;
    const c10::DataPtr staged = scratch(lanes_.in, size_t(bytes));
    cuda_check(cudaMemcpyAsync(staged.get(), mask(), size_t(bytes), cudaMemcpyHostToDevice, stream),
               "copy of a compressed tensor back from the host");
    const auto* const data = static_cast<const char*>(staged.get());
    const ZvcDecompress args{
        reinterpret_cast<const uint32_t*>(data), data + mask_bytes(n_), expected_, to, n_, int(itemsize_), values()};
    const c10::DataPtr workspace = scratch(lanes_.in, zvc_decompress_workspace(args));
    zvc_decompress(args, workspace.get(), expected_ > 0 ? 0 : kBlocksIn, stream);
  }

  int64_t n_, itemsize_, expected_;
  std::shared_ptr<int64_t> nonzeros_;
};

// Run lengths beside the same values. The list of runs has its longest length on the bus, since only the device knows
// how many there are: for comparison, not for speed.
class RleParcel : public LaneParcel {
 public:
  static int64_t host_bytes(int64_t n, int64_t itemsize) { return runs_bytes(n) + n * itemsize; }
  static int64_t staging(int64_t n, int64_t itemsize) {
    return ZvcParcel::staging(n, itemsize, 0) + runs_bytes(n) +
           int64_t(rle_runs_workspace({nullptr, n, nullptr, nullptr}) +
                   rle_mask_workspace({nullptr, n + 1, nullptr, n}));
  }

  RleParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double)
      : LaneParcel(lanes, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
    n_ = from.size() / itemsize_;
    nonzeros_ = Numbers::take(n_);
    used_ = Numbers::take(0);
    sent = returned = {runs_bytes(n_), itemsize_, {n_, nonzeros_}};
    compressed = true;
  }

 private:
  static int64_t runs_bytes(int64_t n) { return 16 * ceil_div(n + 1, 4); }
  int32_t* runs() const { return static_cast<int32_t*>(buffer_->data()); }
  char* values() const { return static_cast<char*>(buffer_->data()) + runs_bytes(n_); }

  void send(const char* from, int64_t) override {
    const auto stream = lanes_.out.stream();
    const c10::DataPtr mask = scratch(lanes_.out, size_t(mask_bytes(n_))), list = scratch(lanes_.out, runs_bytes(n_));
    const ZvcCompress zvc{from, n_, int(itemsize_), static_cast<uint32_t*>(mask.get()), values(), n_, nonzeros_.get()};
    const c10::DataPtr first = scratch(lanes_.out, zvc_compress_workspace(zvc));
    zvc_compress(zvc, first.get(), kBlocksOut, stream);
    const RleRuns rle{zvc.mask, n_, static_cast<int32_t*>(list.get()), used_.get()};
    const c10::DataPtr second = scratch(lanes_.out, rle_runs_workspace(rle));
    rle_runs(rle, second.get(), stream);
    cuda_check(cudaMemcpyAsync(runs(), list.get(), size_t(4 * (n_ + 1)), cudaMemcpyDeviceToHost, stream),
               "copy of runs to the host");
  }

  void receive(char* to, int64_t) override {
    const auto stream = lanes_.in.stream();
    const c10::DataPtr mask = scratch(lanes_.in, size_t(mask_bytes(n_))), list = scratch(lanes_.in, runs_bytes(n_));
    cuda_check(cudaMemcpyAsync(list.get(), runs(), size_t(4 * (n_ + 1)), cudaMemcpyHostToDevice, stream),
               "copy of runs back from the host");
    const RleMask rle{static_cast<const int32_t*>(list.get()), n_ + 1, static_cast<uint32_t*>(mask.get()), n_};
    const c10::DataPtr first = scratch(lanes_.in, rle_mask_workspace(rle));
    rle_mask(rle, first.get(), stream);
    const ZvcDecompress zvc{rle.mask, values(), n_, to, n_, int(itemsize_)};
    const c10::DataPtr second = scratch(lanes_.in, zvc_decompress_workspace(zvc));
    zvc_decompress(zvc, second.get(), kBlocksIn, stream);
  }

  int64_t n_, itemsize_;
  std::shared_ptr<int64_t> nonzeros_, used_;
};

// Bytes per second out and back, with a buffer that goes back to the system at once and is in nobody's pool.
std::pair<double, double> measure(const Lanes& lanes, c10::DeviceIndex device) {
  constexpr int64_t kBytes = 32 << 20;
  const c10::cuda::CUDAGuard guard(device);
  const std::unique_ptr<void, void (*)(void*)> host(allocate_pinned(kBytes), free_pinned);
  if (host == nullptr) return {0, 0};
  const c10::DataPtr there = scratch(lanes.out, kBytes);
  const auto timed = [&](c10::cuda::CUDAStream stream, void* to, const void* from) {
    CudaMarkPtr begin, end;
    for (int i = 0; i < 2; ++i) {  // the first is a warm-up
      begin = mark_on(stream);
      cuda_check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream.stream()), "measured copy");
      end = mark_on(stream);
    }
    end->synchronize();
    return double(kBytes) / end->since(*begin);
  };
  const double out = timed(lanes.out, host.get(), there.get());
  return {out, timed(lanes.in, there.get(), host.get())};
}

class CopyMover : public Mover {
 public:
  CopyMover(int64_t limit, Codec codec)
      : pool_(std::make_shared<HostPool>(HostMemory{allocate_pinned, free_buffer}, limit)), codec_(codec) {}
  bool moves(c10::Device device) const override { return device.is_cuda(); }
  bool asynchronous() const override { return true; }
  bool capturing(c10::Device device) const override { return capturing_stream(device); }
  MarkPtr mark(c10::Device device) override {
    if (!device.is_cuda()) return host_mark();
    return mark_on(c10::cuda::getCurrentCUDAStream(device.index()));
  }
  std::shared_ptr<Parcel> out(const Bytes& from, Codec codec, const MarkPtr& ready, double density) override {
    const c10::cuda::CUDAGuard guard(from.storage.device().index());
    const auto start = [&]<typename P>(int64_t bytes, P*) -> std::shared_ptr<Parcel> {
      auto buffer = pool_->take(bytes);
      if (buffer == nullptr) return nullptr;
      auto parcel = std::make_shared<P>(lanes_[from.storage.device().index()], std::move(buffer), from, density);
      parcel->start_out(from, std::static_pointer_cast<const CudaMark>(ready));
      return parcel;
    };
    auto* const raw = static_cast<RawParcel*>(nullptr);
    if (!compressible(from)) return start(from.size(), raw);
    const int64_t itemsize = int64_t(c10::elementSize(from.dtype)), n = from.size() / itemsize;
    // What goes as it is may go compressed in the next use: with one size the pool has the buffer then.
    if (codec == Codec::none)
      return start(codec_ == Codec::automatic ? ZvcParcel::host_bytes(n, itemsize) : from.size(), raw);
    if (codec == Codec::rle) return start(RleParcel::host_bytes(n, itemsize), static_cast<RleParcel*>(nullptr));
    return start(ZvcParcel::host_bytes(n, itemsize), static_cast<ZvcParcel*>(nullptr));
  }
  Count count(const Bytes& bytes) override {
    const c10::cuda::CUDAGuard guard(bytes.storage.device().index());
    const auto stream = c10::cuda::getCurrentCUDAStream(bytes.storage.device().index());
    const int64_t itemsize = int64_t(c10::elementSize(bytes.dtype)), n = bytes.size() / itemsize;
    auto number = Numbers::take(n);
    const c10::DataPtr mask = scratch(stream, size_t(mask_bytes(n)));
    // Room for no element: all are counted, none is written.
    const ZvcCompress args{address(bytes.storage) + bytes.lo,
                           n,
                           int(itemsize),
                           static_cast<uint32_t*>(mask.get()),
                           mask.get(),
                           0,
                           number.get()};
    const c10::DataPtr workspace = scratch(stream, zvc_compress_workspace(args));
    zvc_compress(args, workspace.get(), 0, stream.stream());
    return {n, std::move(number)};
  }
  int64_t staging(int64_t bytes, int64_t itemsize, double density) const override {
    if (itemsize != 2 && itemsize != 4) return 0;
    return codec_ == Codec::rle ? RleParcel::staging(bytes / itemsize, itemsize)
                                : ZvcParcel::staging(bytes / itemsize, itemsize, density);
  }
  c10::Storage allocate(c10::Device device, int64_t bytes) override { return allocate_on(device, bytes); }
  int64_t host_bytes() const override { return pool_->held(); }
  int64_t host_peak_bytes() const override { return pool_->peak(); }
  int64_t release() override { return pool_->release(); }
  void close() override { pool_->close(); }
  std::pair<double, double> rates(c10::DeviceIndex device) override {
    static auto* const measured = new std::map<c10::DeviceIndex, std::pair<double, double>>;
    auto it = measured->find(device);
    if (it == measured->end()) it = measured->emplace(device, measure(lanes_[device], device)).first;
    return it->second;
  }
  std::vector<uintptr_t> streams(c10::DeviceIndex device) override {
    Lanes& lanes = lanes_[device];
    return {reinterpret_cast<uintptr_t>(lanes.out.stream()), reinterpret_cast<uintptr_t>(lanes.in.stream())};
  }

 private:
  std::shared_ptr<HostPool> pool_;
  LanesOf lanes_;
  const Codec codec_;
};

}  // namespace

std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec) {
  return std::make_shared<CopyMover>(pool_limit, codec);
}

}  // namespace weft::offload
