// The mover "copy": pinned host memory, and a copy stream per direction.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "offload/cuda/zvc_compress.h"
#include "offload/policy/policy.h"
#include "offload/transfer/cuda/copy_streams.h"
#include "offload/transfer/cuda/pinned.h"
#include "offload/transfer/cuda/transfers.h"

namespace weft::offload {

bool capturing_stream(c10::Device device) {
  if (!device.is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

namespace {

// Frees the buffer when its last copy has ended.
void free_buffer(void* data, const std::shared_ptr<void>& busy) {
  if (busy != nullptr) {
    try {
      std::static_pointer_cast<const CudaEvent>(busy)->synchronize();
    } catch (...) {  // the device is gone, and nothing writes any more
    }
  }
  free_pinned(data);
}

// Bytes per second out and back, measured with a buffer outside of the pool.
std::pair<double, double> measure(c10::DeviceIndex device) {
  constexpr int64_t kBytes = 16 << 20;  // no longer than the step beside it can do without the driver
  const c10::cuda::CUDAGuard guard(device);
  // Another thread may be capturing, whose capture an allocation would end.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  // Memory of the default stream, which the program can use afterwards.
  const auto stream = c10::cuda::getStreamFromPool(true, device), owner = c10::cuda::getDefaultCUDAStream(device);
  const std::unique_ptr<void, void (*)(void*)> host(allocate_pinned(kBytes), free_pinned);
  if (host == nullptr) return {0, 0};
  const c10::DataPtr there = scratch(owner, kBytes);
  record_on(owner)->make_wait(stream);
  const auto timed = [&](void* to, const void* from, cudaMemcpyKind kind) {
    CudaEventPtr begin, end;
    for (int i = 0; i < 2; ++i) {  // the first is a warm-up
      begin = record_on(stream);
      PinnedCopies copies(kind);
      copies.add(to, from, kBytes);
      copies.start(stream, "measured copy");
      end = record_on(stream);
    }
    end->synchronize();
    return double(kBytes) / end->since(*begin);
  };
  const double out = timed(host.get(), there.get(), cudaMemcpyDeviceToHost);
  return {out, timed(there.get(), host.get(), cudaMemcpyHostToDevice)};
}

// Bytes of a tensor that the codec stages at a time: large enough for the bus, and a small part of the budget, which
// the ring is taken off. A budget of 0 cannot be met anyway.
int64_t segment_for(std::optional<int64_t> budget) {
  constexpr int64_t kLeast = 4 << 20, kMost = 64 << 20, kShare = 128;
  if (stages().segment > 0) return stages().segment;
  if (!budget || *budget == 0) return kMost;
  return std::clamp(*budget / kShare / kLeast * kLeast, kLeast, kMost);
}

class CopyMover : public CudaMover {
 public:
  CopyMover(int64_t limit, Codec codec, std::optional<int64_t> budget)
      : pool_(std::make_shared<HostPool>(HostMemory{[](int64_t bytes) { return allocate_pinned(bytes); }, free_buffer},
                                         limit)),
        segment_(segment_for(budget)),
        streams_(segment_),
        codec_(codec) {}
  std::shared_ptr<Transfer> out(const Bytes& from, Codec codec, const EventPtr& ready, double density,
                                double share) override {
    const c10::cuda::CUDAGuard guard(from.storage.device().index());
    const int64_t itemsize = int64_t(c10::elementSize(from.dtype)), n = from.size() / itemsize;
    // The next use may compress what this one does not: with one size for both the pool has a buffer then.
    const bool may_code = compressible(from);
    const int64_t room =
        may_code ? room_for(from.size(), itemsize, codec == Codec::none ? codec_ : codec) : from.size();
    const auto start = [&]<typename P>(P*) -> std::shared_ptr<Transfer> {
      auto buffer = pool_->take(room);
      if (buffer == nullptr) return nullptr;
      auto transfer =
          std::make_shared<P>(streams_[from.storage.device().index()], std::move(buffer), from, density, share);
      transfer->start_out(from, ready, joint_);
      return transfer;
    };
    if (!may_code || codec == Codec::none || (codec == Codec::zvc && compressed_elements(n, share) == 0))
      return start(static_cast<RawTransfer*>(nullptr));
    if (codec == Codec::rle) return start(static_cast<RleTransfer*>(nullptr));
    return start(static_cast<ZvcTransfer*>(nullptr));
  }
  bool joins() const override { return true; }
  void begin_joint() override { joint_.open = true; }
  void end_joint() override {
    joint_.open = false;
    const auto outs = std::exchange(joint_.outs, {}), ins = std::exchange(joint_.ins, {});
    if (!outs.empty()) {
      CopyStreams& streams = outs.front()->streams();
      joint_.out.start(streams.out, kCopyOut, /*together=*/true);
      const CudaEventPtr end = offload::record_on(streams.out);
      ++streams.outs;
      for (CopyTransfer* transfer : outs) transfer->end_out(end, streams.outs);
    }
    if (!ins.empty()) {
      CopyStreams& streams = ins.front()->streams();
      joint_.in.start(streams.in, kCopyIn, /*together=*/true);
      const CudaEventPtr end = offload::record_on(streams.in);
      ++streams.ins;
      for (CopyTransfer* transfer : ins) transfer->end_in(end, streams.ins);
    }
  }
  Count count(const Bytes& bytes) override {
    const c10::cuda::CUDAGuard guard(bytes.storage.device().index());
    const auto stream = c10::cuda::getCurrentCUDAStream(bytes.storage.device().index());
    const int64_t itemsize = int64_t(c10::elementSize(bytes.dtype)), n = bytes.size() / itemsize;
    auto number = std::make_shared<PinnedNumber>(n);
    const c10::DataPtr mask = scratch(stream, size_t(zvc_mask_bytes(n)));
    // A capacity of 0: counts all elements and writes none.
    const ZvcCompress args{static_cast<const char*>(bytes.storage.data()) + bytes.lo,
                           n,
                           int(itemsize),
                           static_cast<uint32_t*>(mask.get()),
                           mask.get(),
                           0,
                           number->target()};
    const c10::DataPtr workspace = scratch(stream, zvc_compress_workspace(args));
    zvc_compress(args, workspace.get(), 0, stream.stream());
    number->written(offload::record_on(stream));
    return {n, value_of(std::move(number))};
  }
  int64_t staging(int64_t bytes, int64_t itemsize, double density) const override {
    if (itemsize != 2 && itemsize != 4) return 0;
    return codec_ == Codec::rle ? RleTransfer::staging(bytes / itemsize, itemsize)
                                : ZvcTransfer::staging(bytes / itemsize, itemsize, density, segment_);
  }
  std::vector<int64_t> missing_host(const std::vector<std::pair<int64_t, int64_t>>& tensors) const override {
    std::vector<int64_t> sizes;
    // Of the tensors' types the size alone is known: whole numbers of these sizes are seldom saved.
    for (const auto& [bytes, itemsize] : tensors) sizes.push_back(room_for(bytes, itemsize, codec_));
    return pool_->missing(sizes);
  }
  void* allocate_host(c10::DeviceIndex device, int64_t bytes, const Rest& rest) const override {
    const c10::cuda::CUDAGuard guard(device);
    return allocate_pinned(bytes, rest);
  }
  void keep_host(void* data, int64_t bytes) override { pool_->add(data, bytes); }
  int64_t host_bytes() const override { return pool_->held(); }
  int64_t host_peak_bytes() const override { return pool_->peak(); }
  int64_t host_allocations() const override { return pool_->allocations(); }
  int64_t release() override { return pool_->release(); }
  void close() override { pool_->close(); }
  void settle(c10::Device device) override { streams_.release_staging(device.index()); }
  std::pair<double, double> rates(c10::DeviceIndex device) override {
    static auto* const mutex = new std::mutex;
    static auto* const measured = new std::map<c10::DeviceIndex, std::pair<double, double>>;
    const std::lock_guard lock(*mutex);
    auto it = measured->find(device);
    if (it != measured->end()) return it->second;
    try {
      const auto found = measure(device);
      if (found.first > 0) measured->emplace(device, found);
      return found;
    } catch (const c10::OutOfMemoryError&) {  // a full device is no reason to fail a step
      return {0, 0};
    }
  }
  double codec_rate(c10::DeviceIndex device) const override {
    // A share of the memory's peak rate: clock in kHz, two transfers per cycle, width in bits. Not every device tells.
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
    std::vector<uintptr_t> handles;
    const CopyStreams& of = streams_[device];
    for (const auto& stream : {of.out, of.in, of.compress, of.decompress})
      handles.push_back(reinterpret_cast<uintptr_t>(stream.stream()));
    return handles;
  }

 private:
  // Host memory for so many bytes, if that codec may compress them.
  static int64_t room_for(int64_t bytes, int64_t itemsize, Codec codec) {
    if (codec == Codec::none || (itemsize != 2 && itemsize != 4)) return bytes;
    const int64_t n = bytes / itemsize;
    return codec == Codec::rle ? RleTransfer::host_bytes(n, itemsize) : ZvcTransfer::host_bytes(n, itemsize);
  }

  std::shared_ptr<HostPool> pool_;
  const int64_t segment_;
  StreamsOfDevices streams_;
  const Codec codec_;
  Joint joint_;
};

}  // namespace

void set_stages(int64_t segment, int compress, int decompress) {
  stages() = {segment, compress, decompress};
}

std::shared_ptr<Mover> make_copy_mover(int64_t pool_limit, Codec codec, std::optional<int64_t> budget) {
  return std::make_shared<CopyMover>(pool_limit, codec, budget);
}

}  // namespace weft::offload
