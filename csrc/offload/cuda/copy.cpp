// The mover "copy": pinned host memory, a stream per direction, events.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>

#include "offload/cuda/lanes.h"
#include "offload/cuda/parcels.h"
#include "offload/cuda/pinned.h"
#include "offload/cuda/zvc_compress.h"
#include "offload/policy.h"

namespace weft::offload {

bool capturing_stream(c10::Device device) {
  if (!device.is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

namespace {

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

// Bytes of a tensor that the codec stages at a time: long enough for the bus, but of a small budget, which the ring of
// them is taken off, a small part. A budget of 0 is none to be met.
int64_t segment_for(std::optional<int64_t> budget) {
  constexpr int64_t kLeast = 4 << 20, kMost = 64 << 20, kShare = 128;
  if (stages().segment > 0) return stages().segment;
  if (!budget || *budget == 0) return kMost;
  return std::clamp(*budget / kShare / kLeast * kLeast, kLeast, kMost);
}

class CopyMover : public CudaMover {
 public:
  CopyMover(int64_t limit, Codec codec, std::optional<int64_t> budget)
      : pool_(std::make_shared<HostPool>(HostMemory{allocate_pinned, free_buffer}, limit)),
        segment_(segment_for(budget)),
        lanes_(segment_),
        codec_(codec) {}
  std::shared_ptr<Parcel> out(const Bytes& from, Codec codec, const MarkPtr& ready, double density,
                              double share) override {
    const c10::cuda::CUDAGuard guard(from.storage.device().index());
    const auto start = [&]<typename P>(int64_t bytes, P*) -> std::shared_ptr<Parcel> {
      auto buffer = pool_->take(bytes);
      if (buffer == nullptr) return nullptr;
      auto parcel = std::make_shared<P>(lanes_[from.storage.device().index()], std::move(buffer), from, density, share);
      parcel->start_out(from, ready);
      return parcel;
    };
    auto* const raw = static_cast<RawParcel*>(nullptr);
    if (!compressible(from)) return start(from.size(), raw);
    const int64_t itemsize = int64_t(c10::elementSize(from.dtype)), n = from.size() / itemsize;
    // What goes as it is may go compressed in the next use: with one size the pool has the buffer then.
    if (codec == Codec::none || (codec == Codec::zvc && compressed_elements(n, share) == 0))
      return start(codec_ == Codec::automatic ? ZvcParcel::host_bytes(n, itemsize) : from.size(), raw);
    if (codec == Codec::rle) return start(RleParcel::host_bytes(n, itemsize), static_cast<RleParcel*>(nullptr));
    return start(ZvcParcel::host_bytes(n, itemsize), static_cast<ZvcParcel*>(nullptr));
  }
  Count count(const Bytes& bytes) override {
    const c10::cuda::CUDAGuard guard(bytes.storage.device().index());
    const auto stream = c10::cuda::getCurrentCUDAStream(bytes.storage.device().index());
    const int64_t itemsize = int64_t(c10::elementSize(bytes.dtype)), n = bytes.size() / itemsize;
    auto number = std::make_shared<PinnedNumber>(n);
    const c10::DataPtr mask = scratch(stream, size_t(zvc_mask_bytes(n)));
    // Room for no element: all are counted, none is written.
    const ZvcCompress args{static_cast<const char*>(bytes.storage.data()) + bytes.lo,
                           n,
                           int(itemsize),
                           static_cast<uint32_t*>(mask.get()),
                           mask.get(),
                           0,
                           number->target()};
    const c10::DataPtr workspace = scratch(stream, zvc_compress_workspace(args));
    zvc_compress(args, workspace.get(), 0, stream.stream());
    number->written(offload::mark_on(stream));
    return {n, value_of(std::move(number))};
  }
  int64_t staging(int64_t bytes, int64_t itemsize, double density) const override {
    if (itemsize != 2 && itemsize != 4) return 0;
    return codec_ == Codec::rle ? RleParcel::staging(bytes / itemsize, itemsize)
                                : ZvcParcel::staging(bytes / itemsize, itemsize, density, segment_);
  }
  int64_t host_bytes() const override { return pool_->held(); }
  int64_t host_peak_bytes() const override { return pool_->peak(); }
  int64_t host_allocations() const override { return pool_->allocations(); }
  int64_t release() override { return pool_->release(); }
  void close() override { pool_->close(); }
  void settle(c10::Device device) override { lanes_.release_staging(device.index()); }
  std::pair<double, double> rates(c10::DeviceIndex device) override {
    static auto* const measured = new std::map<c10::DeviceIndex, std::pair<double, double>>;
    auto it = measured->find(device);
    if (it != measured->end()) return it->second;
    try {
      const auto found = measure(lanes_[device], device);
      if (found.first > 0) measured->emplace(device, found);
      return found;
    } catch (const c10::OutOfMemoryError&) {  // of a device that is full, which is no reason to refuse a step
      return {0, 0};
    }
  }
  double codec_rate(c10::DeviceIndex device) const override {
    // Of what the memory does at most, which nobody can say of every device: in kHz, both edges, and in bits.
    constexpr double kShare = 0.6;
    int clock = 0, width = 0;
    if (cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&width, cudaDevAttrGlobalMemoryBusWidth, device) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return kShare * 2e3 * double(clock) * double(width) / 8;
  }
  std::vector<uintptr_t> streams(c10::DeviceIndex device) override {
    std::vector<uintptr_t> streams;
    const Lanes& lanes = lanes_[device];
    for (const auto& stream : {lanes.out, lanes.in, lanes.pack, lanes.spread})
      streams.push_back(reinterpret_cast<uintptr_t>(stream.stream()));
    return streams;
  }

 private:
  std::shared_ptr<HostPool> pool_;
  const int64_t segment_;
  LanesOf lanes_;
  const Codec codec_;
};

}  // namespace

void set_stages(int64_t segment, int pack, int spread) {
  stages() = {segment, pack, spread};
}

std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec, std::optional<int64_t> budget) {
  return std::make_shared<CopyMover>(pool_limit, codec, budget);
}

}  // namespace weft::offload
