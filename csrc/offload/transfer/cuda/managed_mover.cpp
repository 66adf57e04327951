// The mover "managed": activations live in managed memory, and a move migrates their pages. A pool of torch's allocator
// takes its segments from weft_managed_allocate while a `with` block runs.
//
// A moved block keeps its addresses: its pages are in host memory until they are prefetched back. When the graph drops
// a block whose pages are out, they are prefetched back before its memory is reused, or the next user's kernels would
// fetch them one fault at a time. Only whole pages inside a tensor's range move; a neighbour in the same page stays.
//
// Source: AutoVM (Chen, 2020), chapter 4.
#include <map>
#include <mutex>

#include "common/integers.h"
#include "offload/transfer/cuda/copy_streams.h"

namespace weft::offload {
namespace {

// The segments handed to torch's allocator.
struct Segments {
  std::mutex mutex;
  std::map<uintptr_t, std::pair<int64_t, bool>> all;  // address: (bytes, managed)
  int64_t managed = 0;
};
Segments& segments() {
  static Segments* all = new Segments;
  return *all;
}

bool is_managed(const void* data) {
  const std::lock_guard lock(segments().mutex);
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto it = segments().all.upper_bound(address);
  if (it == segments().all.begin()) return false;
  --it;
  return it->second.second && address < it->first + uintptr_t(it->second.first);
}

cudaError_t prefetch(const void* data, int64_t bytes, bool to_host, int device, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  const cudaMemLocation where = {to_host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, to_host ? 0 : device};
  return cudaMemPrefetchAsync(data, size_t(bytes), where, 0, stream);
#else
  return cudaMemPrefetchAsync(data, size_t(bytes), to_host ? cudaCpuDeviceId : device, stream);
#endif
}

constexpr int64_t kPage = 64 << 10;

}  // namespace

bool has_managed(int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, cudaDevAttrConcurrentManagedAccess, device) == cudaSuccess && value != 0;
}

namespace {

class ManagedTransfer : public Transfer {
 public:
  ManagedTransfer(CopyStreams& streams, std::shared_ptr<int64_t> out_bytes, const Bytes& from)
      : streams_(streams),
        out_bytes_(std::move(out_bytes)),
        storage_(from.storage),
        device_(from.storage.device().index()),
        saved_on_(c10::cuda::getCurrentCUDAStream(device_)) {
    const auto base = reinterpret_cast<uintptr_t>(from.storage.data());
    first_ = uintptr_t(round_up(int64_t(base) + from.lo));
    bytes_ = std::max<int64_t>(int64_t((base + uintptr_t(from.hi)) / kPage * kPage) - int64_t(first_), 0);
    sent.fixed = returned.fixed = bytes_;
  }
  ~ManagedTransfer() override {
    *out_bytes_ -= bytes_;
    if (bytes_ > 0 && out_ != nullptr && in_ == nullptr) {
      try {
        out_->make_wait(saved_on_);
        prefetch(reinterpret_cast<void*>(first_), bytes_, false, device_, saved_on_.stream());
      } catch (...) {  // the device is gone
      }
    }
  }

  void start_out(EventPtr ready) {
    *out_bytes_ += bytes_;
    if (ready == nullptr) ready = std::make_shared<CudaEvent>(saved_on_);
    make_wait(*ready, streams_.out);
    out_begin = begin_of(ready, streams_.last_out);
    if (bytes_ > 0)
      cuda_check(prefetch(reinterpret_cast<void*>(first_), bytes_, true, device_, streams_.out.stream()),
                 "prefetch of managed memory to the host");
    streams_.last_out = out_end = out_ = std::make_shared<CudaEvent>(streams_.out);
  }

  c10::Storage home() const override { return storage_; }
  bool is_out(bool ask) override { return ask ? out_->completed() : out_->known_completed(); }
  void wait_out() override { out_->make_wait(saved_on_); }
  void start_in(const Bytes&, const EventPtr& now) override {
    out_->make_wait(streams_.in);
    const EventPtr ready = now != nullptr ? now : std::make_shared<CudaEvent>(c10::cuda::getCurrentCUDAStream(device_));
    make_wait(*ready, streams_.in);
    in_begin = begin_of(ready, streams_.last_in);
    if (bytes_ > 0)
      cuda_check(prefetch(reinterpret_cast<void*>(first_), bytes_, false, device_, streams_.in.stream()),
                 "prefetch of managed memory back to the device");
    streams_.last_in = here = in_end = in_ = std::make_shared<CudaEvent>(streams_.in);
  }
  void wait_in(const c10::Storage& to) override {
    if (in_ == nullptr) return;
    const auto stream = c10::cuda::getCurrentCUDAStream(device_);
    in_->make_wait(stream);
    used_on(to, stream);
  }

 private:
  static int64_t round_up(int64_t address) { return ceil_div(address, kPage) * kPage; }

  CopyStreams& streams_;
  std::shared_ptr<int64_t> out_bytes_;
  c10::Storage storage_;
  c10::DeviceIndex device_;
  c10::cuda::CUDAStream saved_on_;
  uintptr_t first_;
  int64_t bytes_;
  CudaEventPtr out_, in_;
};

class ManagedMover : public CudaMover {
 public:
  explicit ManagedMover(int64_t limit) : limit_(limit) {}
  bool holds(const c10::Storage& storage) const override { return is_managed(storage.data()); }
  std::shared_ptr<Transfer> out(const Bytes& from, Codec, const EventPtr& ready, double, double) override {
    const c10::cuda::CUDAGuard guard(from.storage.device().index());
    if (*out_bytes_ + from.size() > limit_) return nullptr;
    auto transfer = std::make_shared<ManagedTransfer>(streams_[from.storage.device().index()], out_bytes_, from);
    transfer->start_out(ready);
    peak_ = std::max(peak_, *out_bytes_);
    return transfer;
  }
  Count count(const Bytes&) override { return {}; }
  int64_t host_bytes() const override { return *out_bytes_; }
  int64_t host_peak_bytes() const override { return peak_; }
  int64_t release() override { return 0; }
  void close() override {}
  std::vector<uintptr_t> streams(c10::DeviceIndex device) override {
    return {reinterpret_cast<uintptr_t>(streams_[device].out.stream()),
            reinterpret_cast<uintptr_t>(streams_[device].in.stream())};
  }

 private:
  const int64_t limit_;
  int64_t peak_ = 0;
  std::shared_ptr<int64_t> out_bytes_ = std::make_shared<int64_t>(0);
  StreamsOfDevices streams_;
};

}  // namespace

std::shared_ptr<Mover> make_managed_mover(int64_t pool_limit) {
  return std::make_shared<ManagedMover>(pool_limit);
}

}  // namespace weft::offload

// The allocator of a torch MemPool: managed memory up to half of what is free on the device, then ordinary memory,
// which does not move.
extern "C" __attribute__((visibility("default"))) void* weft_managed_allocate(ssize_t bytes, int device, cudaStream_t) {
  using namespace weft::offload;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  auto& s = segments();
  const std::lock_guard lock(s.mutex);
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return cudaGetLastError(), nullptr;
  void* data = nullptr;
  const bool managed = s.managed + int64_t(bytes) <= int64_t(free / 2);
  const cudaError_t status =
      managed ? cudaMallocManaged(&data, size_t(bytes), cudaMemAttachGlobal) : cudaMalloc(&data, size_t(bytes));
  if (status != cudaSuccess) return cudaGetLastError(), nullptr;
  if (managed) {
    s.managed += int64_t(bytes);
    if (prefetch(data, bytes, false, device, nullptr) != cudaSuccess) cudaGetLastError();
  }
  s.all[reinterpret_cast<uintptr_t>(data)] = {int64_t(bytes), managed};
  return data;
}

extern "C" __attribute__((visibility("default"))) void weft_managed_free(void* data, ssize_t bytes, int device,
                                                                         cudaStream_t) {
  using namespace weft::offload;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  auto& s = segments();
  const std::lock_guard lock(s.mutex);
  const auto it = s.all.find(reinterpret_cast<uintptr_t>(data));
  if (it != s.all.end()) {
    if (it->second.second) s.managed -= int64_t(bytes);
    s.all.erase(it);
  }
  if (cudaFree(data) != cudaSuccess) cudaGetLastError();
}
