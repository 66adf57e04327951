#include "offload/cuda/parcels.h"

#include <algorithm>
#include <cmath>

#include "common/integers.h"
#include "offload/cuda/rle_compress.h"
#include "offload/cuda/zvc_compress.h"
#include "offload/policy.h"

namespace weft::offload {
namespace {

// Of kernels that use host memory: enough to fill the bus beside compute, which each of them slows down.
constexpr int kBlocksOut = 12, kBlocksIn = 16;

char* address(const c10::Storage& storage) {
  return static_cast<char*>(storage.mutable_data());
}

// With a little more than what was counted the last time: activations drift, and their parts differ. 0 where nothing
// was counted.
int64_t expected(int64_t n, double density) {
  return density > 0 ? std::min(n, int64_t(1.01 * density * double(n) + 4 * std::sqrt(double(n)))) : 0;
}

void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, c10::cuda::CUDAStream lane) {
  cuda_check(cudaMemcpyAsync(to, from, size_t(bytes), kind, lane.stream()),
             kind == cudaMemcpyDeviceToHost ? "copy of a saved tensor to the host"
                                            : "copy of a saved tensor back from the host");
}

size_t pack_workspace(int64_t n, int64_t itemsize) {
  return zvc_compress_workspace({nullptr, n, int(itemsize), nullptr, nullptr, n, nullptr});
}
size_t spread_workspace(int64_t n, int64_t itemsize) {
  return zvc_decompress_workspace({nullptr, nullptr, n, nullptr, n, int(itemsize)});
}

}  // namespace

Stages& stages() {
  static Stages all;
  return all;
}

// ---- On the lanes

LaneParcel::LaneParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from)
    : lanes_(lanes),
      buffer_(std::move(buffer)),
      moved_on_(c10::cuda::getCurrentCUDAStream(from.storage.device().index())) {}

void LaneParcel::start_out(const Bytes& from, MarkPtr ready) {
  used_on(from.storage, moved_on_);
  if (ready == nullptr) ready = mark_on(moved_on_);
  const auto first = first_out();
  hold(*ready, first);
  if (buffer_->busy != nullptr) {
    // Who read the last tensor of this memory may be what made this one, and has waited for the copy back already.
    const auto busy = std::static_pointer_cast<const CudaMark>(buffer_->busy);
    const bool waited = ready->both() == nullptr && static_cast<const CudaMark&>(*ready).is_behind(*busy);
    if (!waited) busy->hold(first);
  }
  out_begin = begin_of(ready, lanes_.last_out);
  send(address(from.storage) + from.lo, from.size());
  lanes_.last_out = out_end = out_ = mark_on(lanes_.out);
  number_ = ++lanes_.outs;
  for (auto& number : numbers_) number->written(out_);
  buffer_->busy = std::const_pointer_cast<CudaMark>(out_);
}

void LaneParcel::wait_out() {
  int64_t& waited = lanes_.waited(moved_on_);
  if (waited >= number_ || out_->seen()) return;
  out_->hold(moved_on_);
  waited = number_;
}

void LaneParcel::start_in(const Bytes& to, const MarkPtr& now) {
  const c10::cuda::CUDAGuard guard(to.storage.device().index());
  allocated_on_ = c10::cuda::getCurrentCUDAStream(to.storage.device().index());
  const MarkPtr ready = now != nullptr ? now : mark_on(*allocated_on_);
  hold(*ready, lanes_.in);
  // A stream that waits for the copy out says so by `ready`, which is behind that.
  if (!out_->seen() && lanes_.waited(*allocated_on_) < number_) out_->hold(lanes_.in);
  in_begin = begin_of(ready, lanes_.last_in);
  const auto last = receive(address(to.storage) + to.lo, to.size());
  const CudaMarkPtr copied = mark_on(lanes_.in);
  lanes_.last_in = in_end = copied;
  here = in_ = last == lanes_.in ? copied : mark_on(last);
  buffer_->busy = std::const_pointer_cast<CudaMark>(in_);
}

void LaneParcel::wait_in(const c10::Storage& to) {
  if (in_ == nullptr) return;
  const auto stream = c10::cuda::getCurrentCUDAStream(to.device().index());
  in_->hold(stream);
  if (stream == *allocated_on_) return;
  in_->hold(*allocated_on_);
  used_on(to, stream);
}

// ---- As they are

RawParcel::RawParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double, double)
    : LaneParcel(lanes, std::move(buffer), from) {
  sent.fixed = returned.fixed = from.size();
}

void RawParcel::send(const char* from, int64_t bytes) {
  copy(host(), from, bytes, cudaMemcpyDeviceToHost, lanes_.out);
}

c10::cuda::CUDAStream RawParcel::receive(char* to, int64_t bytes) {
  copy(to, host(), bytes, cudaMemcpyHostToDevice, lanes_.in);
  return lanes_.in;
}

// ---- Zero-value compression

int64_t ZvcParcel::host_bytes(int64_t n, int64_t itemsize) {
  return zvc_mask_bytes(n) + n * itemsize;
}

int64_t ZvcParcel::staging(int64_t n, int64_t itemsize, double density, int64_t segment) {
  n = std::min(n, segment / itemsize);
  const auto workspaces = int64_t(pack_workspace(n, itemsize) + spread_workspace(n, itemsize));
  return Staging::kSlots * (zvc_mask_bytes(n) + expected(n, density) * itemsize) + workspaces;
}

ZvcParcel::ZvcParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double density,
                     double share)
    : LaneParcel(lanes, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
  const int64_t n = from.size() / itemsize_, coded = compressed_elements(n, share), most = lanes.segment / itemsize_;
  compressed = true;
  rest_ = {coded, (n - coded) * itemsize_};
  sent.fixed = zvc_mask_bytes(coded) + rest_.bytes;
  sent.itemsize = itemsize_;
  for (int64_t first = 0; first < coded; first += most) {
    const int64_t count = std::min(most, coded - first);
    numbers_.push_back(std::make_shared<PinnedNumber>(count));
    segments_.push_back({first, count, expected(count, density), numbers_.back().get()});
    sent.parts.push_back({{count, value_of(numbers_.back())}, segments_.back().expected});
  }
  returned = sent;
}

int64_t ZvcParcel::staged_bytes(const Segment& segment) const {
  return zvc_mask_bytes(segment.n) + segment.expected * itemsize_;
}
uint32_t* ZvcParcel::mask(const Segment& segment) const {
  return reinterpret_cast<uint32_t*>(host() + zvc_mask_bytes(segment.first) + segment.first * itemsize_);
}
char* ZvcParcel::values(const Segment& segment) const {
  return reinterpret_cast<char*>(mask(segment)) + zvc_mask_bytes(segment.n);
}
char* ZvcParcel::rest() const {
  return host() + zvc_mask_bytes(rest_.first) + rest_.first * itemsize_;
}

void ZvcParcel::send(const char* from, int64_t) {
  const Segment& largest = segments_.front();
  const c10::DataPtr workspace = scratch(first_out(), pack_workspace(largest.n, itemsize_));
  if (staged()) lanes_.staging.reserve(staged_bytes(largest));
  if (rest_.bytes > 0) {
    // Before the segments, which the codec compresses meanwhile. Its lane has waited for what the copy has to wait for.
    if (staged()) mark_on(lanes_.pack)->hold(lanes_.out);
    copy(rest(), from + rest_.first * itemsize_, rest_.bytes, cudaMemcpyDeviceToHost, lanes_.out);
  }
  for (const Segment& s : segments_) {
    const char* const x = from + s.first * itemsize_;
    if (!staged()) {
      zvc_compress({x, s.n, int(itemsize_), mask(s), values(s), s.n, s.nonzeros->target()}, workspace.get(), kBlocksOut,
                   lanes_.out.stream());
      continue;
    }
    Staging::Slot& slot = lanes_.staging.next(lanes_.pack);
    zvc_compress({x, s.n, int(itemsize_), reinterpret_cast<uint32_t*>(slot.data()), slot.data() + zvc_mask_bytes(s.n),
                  s.expected, s.nonzeros->target(), values(s)},
                 workspace.get(), stages().pack, lanes_.pack.stream());
    mark_on(lanes_.pack)->hold(lanes_.out);
    copy(mask(s), slot.data(), staged_bytes(s), cudaMemcpyDeviceToHost, lanes_.out);
    slot.read = mark_on(lanes_.out);
  }
}

c10::cuda::CUDAStream ZvcParcel::receive(char* to, int64_t) {
  const Segment& largest = segments_.front();
  const c10::DataPtr workspace = scratch(lanes_.spread, spread_workspace(largest.n, itemsize_));
  lanes_.staging.reserve(staged_bytes(largest));
  for (const Segment& s : segments_) {
    Staging::Slot& slot = lanes_.staging.next(lanes_.in);
    copy(slot.data(), mask(s), staged_bytes(s), cudaMemcpyHostToDevice, lanes_.in);
    mark_on(lanes_.in)->hold(lanes_.spread);
    zvc_decompress({reinterpret_cast<const uint32_t*>(slot.data()), slot.data() + zvc_mask_bytes(s.n), s.expected,
                    to + s.first * itemsize_, s.n, int(itemsize_), values(s)},
                   workspace.get(), staged() ? stages().spread : kBlocksIn, lanes_.spread.stream());
    slot.read = mark_on(lanes_.spread);
  }
  if (rest_.bytes > 0) {
    copy(to + rest_.first * itemsize_, rest(), rest_.bytes, cudaMemcpyHostToDevice, lanes_.in);
    mark_on(lanes_.in)->hold(lanes_.spread);  // which says when all is here
  }
  return lanes_.spread;
}

// ---- Run lengths

namespace {

int64_t runs_bytes(int64_t n) {
  return 16 * ceil_div(n + 1, 4);
}

}  // namespace

int64_t RleParcel::host_bytes(int64_t n, int64_t itemsize) {
  return runs_bytes(n) + n * itemsize;
}

int64_t RleParcel::staging(int64_t n, int64_t itemsize) {
  return zvc_mask_bytes(n) + runs_bytes(n) +
         int64_t(pack_workspace(n, itemsize) + spread_workspace(n, itemsize) +
                 rle_runs_workspace({nullptr, n, nullptr, nullptr}) + rle_mask_workspace({nullptr, n + 1, nullptr, n}));
}

RleParcel::RleParcel(Lanes& lanes, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double, double)
    : LaneParcel(lanes, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
  n_ = from.size() / itemsize_;
  numbers_ = {std::make_shared<PinnedNumber>(n_), std::make_shared<PinnedNumber>(0)};
  sent = returned = {runs_bytes(n_), itemsize_, {{{n_, value_of(numbers_[0])}, 0}}};
  compressed = true;
}

int32_t* RleParcel::runs() const {
  return reinterpret_cast<int32_t*>(host());
}
char* RleParcel::values() const {
  return host() + runs_bytes(n_);
}

void RleParcel::send(const char* from, int64_t) {
  const auto lane = lanes_.out;
  const c10::DataPtr mask = scratch(lane, size_t(zvc_mask_bytes(n_))), list = scratch(lane, size_t(runs_bytes(n_)));
  const ZvcCompress zvc{from,     n_, int(itemsize_),       static_cast<uint32_t*>(mask.get()),
                        values(), n_, numbers_[0]->target()};
  const RleRuns rle{zvc.mask, n_, static_cast<int32_t*>(list.get()), numbers_[1]->target()};
  const c10::DataPtr first = scratch(lane, zvc_compress_workspace(zvc)),
                     second = scratch(lane, rle_runs_workspace(rle));
  zvc_compress(zvc, first.get(), kBlocksOut, lane.stream());
  rle_runs(rle, second.get(), lane.stream());
  copy(runs(), list.get(), 4 * (n_ + 1), cudaMemcpyDeviceToHost, lane);
}

c10::cuda::CUDAStream RleParcel::receive(char* to, int64_t) {
  const auto lane = lanes_.in;
  const c10::DataPtr mask = scratch(lane, size_t(zvc_mask_bytes(n_))), list = scratch(lane, size_t(runs_bytes(n_)));
  const RleMask rle{static_cast<const int32_t*>(list.get()), n_ + 1, static_cast<uint32_t*>(mask.get()), n_};
  const ZvcDecompress zvc{rle.mask, values(), n_, to, n_, int(itemsize_)};
  const c10::DataPtr first = scratch(lane, rle_mask_workspace(rle)),
                     second = scratch(lane, zvc_decompress_workspace(zvc));
  copy(list.get(), runs(), 4 * (n_ + 1), cudaMemcpyHostToDevice, lane);
  rle_mask(rle, first.get(), lane.stream());
  zvc_decompress(zvc, second.get(), kBlocksIn, lane.stream());
  return lane;
}

}  // namespace weft::offload
