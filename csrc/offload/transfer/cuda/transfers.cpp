#include "offload/transfer/cuda/transfers.h"

#include <algorithm>
#include <cmath>

#include "common/integers.h"
#include "offload/cuda/rle_compress.h"
#include "offload/cuda/zvc_compress.h"
#include "offload/policy/policy.h"

namespace weft::offload {
namespace {

// Blocks of kernels that access host memory: just enough to fill the bus, since each slows the compute beside it.
constexpr int kBlocksOut = 12, kBlocksIn = 16;

char* address(const c10::Storage& storage) {
  return static_cast<char*>(storage.mutable_data());
}

// Values to expect among n: a little more than the last count, since activations drift and parts of a tensor differ; 0
// where nothing was counted.
int64_t expected(int64_t n, double density) {
  return density > 0 ? std::min(n, int64_t(1.01 * density * double(n) + 4 * std::sqrt(double(n)))) : 0;
}

void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, c10::cuda::CUDAStream stream,
          bool whole = false) {
  PinnedCopies copies(kind);
  copies.add(to, from, bytes, whole);
  copies.start(stream, kind == cudaMemcpyDeviceToHost ? kCopyOut : kCopyIn);
}

size_t compress_workspace(int64_t n, int64_t itemsize) {
  return zvc_compress_workspace({nullptr, n, int(itemsize), nullptr, nullptr, n, nullptr});
}
size_t decompress_workspace(int64_t n, int64_t itemsize) {
  return zvc_decompress_workspace({nullptr, nullptr, n, nullptr, n, int(itemsize)});
}

}  // namespace

Stages& stages() {
  static Stages all;
  return all;
}

// ---- On the streams

CopyTransfer::CopyTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from)
    : streams_(streams),
      buffer_(std::move(buffer)),
      moved_on_(c10::cuda::getCurrentCUDAStream(from.storage.device().index())) {}

void CopyTransfer::start_out(const Bytes& from, EventPtr ready, Joint& joint) {
  joint_ = &joint;
  used_on(from.storage, moved_on_);
  if (ready == nullptr) ready = record_on(moved_on_);
  const auto first = first_out();
  make_wait_once(*ready, first);
  if (buffer_->busy != nullptr) {
    // The stream that saved this tensor may have read the buffer's last one: then it has waited for that copy already.
    const auto busy = std::static_pointer_cast<const CudaEvent>(buffer_->busy);
    const bool waited = ready->pair() == nullptr && static_cast<const CudaEvent&>(*ready).is_behind(*busy);
    if (!waited) busy->make_wait_once(first);
  }
  out_begin = begin_of(ready, streams_.last_out);
  send(address(from.storage) + from.lo, from.size());
  source_ = from.storage.data();
  if (joint.open && joins())
    joint.outs.push_back(this);
  else
    end_out(record_on(streams_.out), ++streams_.outs);
}

void CopyTransfer::end_out(CudaEventPtr end, int64_t number) {
  streams_.last_out = out_end = out_ = std::move(end);
  number_ = number;
  for (auto& number : numbers_) number->written(out_);
  buffer_->busy = std::const_pointer_cast<CudaEvent>(out_);
  guard_source(source_, moved_on_, out_);
}

void CopyTransfer::release_out() {
  if (out_ == nullptr) return;
  if (const void* source = std::exchange(source_, nullptr)) release_source(source, out_);
}

bool CopyTransfer::is_out(bool ask) {
  const bool out = ask ? out_->completed() : out_->known_completed() || streams_.waited(moved_on_).out >= number_;
  if (out) release_out();
  return out;
}

void CopyTransfer::wait_out() {
  release_out();
  int64_t& waited = streams_.waited(moved_on_).out;
  if (waited >= number_ || out_->known_completed()) return;
  out_->make_wait(moved_on_);
  waited = number_;
}

void CopyTransfer::start_in(const Bytes& to, const EventPtr& now) {
  const c10::cuda::CUDAGuard guard(to.storage.device().index());
  allocated_on_ = c10::cuda::getCurrentCUDAStream(to.storage.device().index());
  const EventPtr ready = now != nullptr ? now : record_on(*allocated_on_);
  make_wait_once(*ready, streams_.in);
  // Where the stream has waited for the copy out, `ready` is behind that wait.
  if (!out_->known_completed() && streams_.waited(*allocated_on_).out < number_) out_->make_wait_once(streams_.in);
  in_begin = begin_of(ready, streams_.last_in);
  const auto last = receive(address(to.storage) + to.lo, to.size());
  if (joint_->open && joins()) {
    joint_->ins.push_back(this);
    return;
  }
  end_in(record_on(streams_.in), ++streams_.ins);
  if (last == streams_.in) return;
  here = in_ = record_on(last);
  number_in_ = 0;
  buffer_->busy = std::const_pointer_cast<CudaEvent>(in_);
}

void CopyTransfer::end_in(CudaEventPtr end, int64_t number) {
  streams_.last_in = in_end = here = in_ = std::move(end);
  number_in_ = number;
  buffer_->busy = std::const_pointer_cast<CudaEvent>(in_);
}

void CopyTransfer::make_wait_in(c10::cuda::CUDAStream stream) {
  if (is_behind(stream) || in_->known_completed()) return;
  in_->make_wait(stream);
  if (number_in_ > 0) streams_.waited(stream).in = number_in_;
}

void CopyTransfer::wait_in(const c10::Storage& to) {
  if (in_ == nullptr) return;
  const auto stream = c10::cuda::getCurrentCUDAStream(to.device().index());
  make_wait_in(stream);
  if (stream == *allocated_on_) return;
  make_wait_in(*allocated_on_);
  used_on(to, stream);
}

bool CopyTransfer::arrived() const {
  return in_ == nullptr || in_->known_completed() ||
         is_behind(c10::cuda::getCurrentCUDAStream(allocated_on_->device_index()));
}

// ---- As they are

RawTransfer::RawTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double,
                         double)
    : CopyTransfer(streams, std::move(buffer), from) {
  sent.fixed = returned.fixed = from.size();
}

void RawTransfer::send(const char* from, int64_t bytes) {
  if (joint_->open)
    joint_->out.add(host(), from, bytes, whole());
  else
    copy(host(), from, bytes, cudaMemcpyDeviceToHost, streams_.out, whole());
}

c10::cuda::CUDAStream RawTransfer::receive(char* to, int64_t bytes) {
  if (joint_->open)
    joint_->in.add(to, host(), bytes, whole());
  else
    copy(to, host(), bytes, cudaMemcpyHostToDevice, streams_.in, whole());
  return streams_.in;
}

// ---- Zero-value compression

int64_t ZvcTransfer::host_bytes(int64_t n, int64_t itemsize) {
  return zvc_mask_bytes(n) + n * itemsize;
}

int64_t ZvcTransfer::staging(int64_t n, int64_t itemsize, double density, int64_t segment) {
  n = std::min(n, segment / itemsize);
  const auto workspaces = int64_t(compress_workspace(n, itemsize) + decompress_workspace(n, itemsize));
  return Staging::kSlots * (zvc_mask_bytes(n) + expected(n, density) * itemsize) + workspaces;
}

ZvcTransfer::ZvcTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from,
                         double density, double share)
    : CopyTransfer(streams, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
  const int64_t n = from.size() / itemsize_, coded = compressed_elements(n, share), most = streams.segment / itemsize_;
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

int64_t ZvcTransfer::staged_bytes(const Segment& segment) const {
  return zvc_mask_bytes(segment.n) + segment.expected * itemsize_;
}
uint32_t* ZvcTransfer::mask(const Segment& segment) const {
  return reinterpret_cast<uint32_t*>(host() + zvc_mask_bytes(segment.first) + segment.first * itemsize_);
}
char* ZvcTransfer::values(const Segment& segment) const {
  return reinterpret_cast<char*>(mask(segment)) + zvc_mask_bytes(segment.n);
}
char* ZvcTransfer::rest() const {
  return host() + zvc_mask_bytes(rest_.first) + rest_.first * itemsize_;
}

void ZvcTransfer::send(const char* from, int64_t) {
  const Segment& largest = segments_.front();
  const c10::DataPtr workspace = scratch(first_out(), compress_workspace(largest.n, itemsize_));
  if (staged()) streams_.staging.reserve(staged_bytes(largest));
  if (rest_.bytes > 0) {
    // Before the segments, which the codec compresses meanwhile. The codec's stream has done the waits of the copy.
    if (staged()) record_on(streams_.compress)->make_wait(streams_.out);
    copy(rest(), from + rest_.first * itemsize_, rest_.bytes, cudaMemcpyDeviceToHost, streams_.out);
  }
  for (const Segment& s : segments_) {
    const char* const x = from + s.first * itemsize_;
    if (!staged()) {
      zvc_compress({x, s.n, int(itemsize_), mask(s), values(s), s.n, s.nonzeros->target()}, workspace.get(), kBlocksOut,
                   streams_.out.stream());
      continue;
    }
    Staging::Slot& slot = streams_.staging.next(streams_.compress);
    zvc_compress({x, s.n, int(itemsize_), reinterpret_cast<uint32_t*>(slot.data()), slot.data() + zvc_mask_bytes(s.n),
                  s.expected, s.nonzeros->target(), values(s)},
                 workspace.get(), stages().compress, streams_.compress.stream());
    record_on(streams_.compress)->make_wait(streams_.out);
    copy(mask(s), slot.data(), staged_bytes(s), cudaMemcpyDeviceToHost, streams_.out);
    slot.read = record_on(streams_.out);
  }
}

c10::cuda::CUDAStream ZvcTransfer::receive(char* to, int64_t) {
  const Segment& largest = segments_.front();
  const c10::DataPtr workspace = scratch(streams_.decompress, decompress_workspace(largest.n, itemsize_));
  streams_.staging.reserve(staged_bytes(largest));
  for (const Segment& s : segments_) {
    Staging::Slot& slot = streams_.staging.next(streams_.in);
    copy(slot.data(), mask(s), staged_bytes(s), cudaMemcpyHostToDevice, streams_.in);
    record_on(streams_.in)->make_wait(streams_.decompress);
    zvc_decompress({reinterpret_cast<const uint32_t*>(slot.data()), slot.data() + zvc_mask_bytes(s.n), s.expected,
                    to + s.first * itemsize_, s.n, int(itemsize_), values(s)},
                   workspace.get(), staged() ? stages().decompress : kBlocksIn, streams_.decompress.stream());
    slot.read = record_on(streams_.decompress);
  }
  if (rest_.bytes > 0) {
    copy(to + rest_.first * itemsize_, rest(), rest_.bytes, cudaMemcpyHostToDevice, streams_.in);
    record_on(streams_.in)->make_wait(streams_.decompress);  // whose event ends the whole copy in
  }
  return streams_.decompress;
}

// ---- Run lengths

namespace {

int64_t runs_bytes(int64_t n) {
  return 16 * ceil_div(n + 1, 4);
}

}  // namespace

int64_t RleTransfer::host_bytes(int64_t n, int64_t itemsize) {
  return runs_bytes(n) + n * itemsize;
}

int64_t RleTransfer::staging(int64_t n, int64_t itemsize) {
  return zvc_mask_bytes(n) + runs_bytes(n) +
         int64_t(compress_workspace(n, itemsize) + decompress_workspace(n, itemsize) +
                 rle_runs_workspace({nullptr, n, nullptr, nullptr}) + rle_mask_workspace({nullptr, n + 1, nullptr, n}));
}

RleTransfer::RleTransfer(CopyStreams& streams, std::unique_ptr<HostPool::Buffer> buffer, const Bytes& from, double,
                         double)
    : CopyTransfer(streams, std::move(buffer), from), itemsize_(int64_t(c10::elementSize(from.dtype))) {
  n_ = from.size() / itemsize_;
  numbers_ = {std::make_shared<PinnedNumber>(n_), std::make_shared<PinnedNumber>(0)};
  sent = returned = {runs_bytes(n_), itemsize_, {{{n_, value_of(numbers_[0])}, 0}}};
  compressed = true;
}

int32_t* RleTransfer::runs() const {
  return reinterpret_cast<int32_t*>(host());
}
char* RleTransfer::values() const {
  return host() + runs_bytes(n_);
}

void RleTransfer::send(const char* from, int64_t) {
  const auto stream = streams_.out;
  const c10::DataPtr mask = scratch(stream, size_t(zvc_mask_bytes(n_))), list = scratch(stream, size_t(runs_bytes(n_)));
  const ZvcCompress zvc{from,     n_, int(itemsize_),       static_cast<uint32_t*>(mask.get()),
                        values(), n_, numbers_[0]->target()};
  const RleRuns rle{zvc.mask, n_, static_cast<int32_t*>(list.get()), numbers_[1]->target()};
  const c10::DataPtr first = scratch(stream, zvc_compress_workspace(zvc)),
                     second = scratch(stream, rle_runs_workspace(rle));
  zvc_compress(zvc, first.get(), kBlocksOut, stream.stream());
  rle_runs(rle, second.get(), stream.stream());
  copy(runs(), list.get(), 4 * (n_ + 1), cudaMemcpyDeviceToHost, stream);
}

c10::cuda::CUDAStream RleTransfer::receive(char* to, int64_t) {
  const auto stream = streams_.in;
  const c10::DataPtr mask = scratch(stream, size_t(zvc_mask_bytes(n_))), list = scratch(stream, size_t(runs_bytes(n_)));
  const RleMask rle{static_cast<const int32_t*>(list.get()), n_ + 1, static_cast<uint32_t*>(mask.get()), n_};
  const ZvcDecompress zvc{rle.mask, values(), n_, to, n_, int(itemsize_)};
  const c10::DataPtr first = scratch(stream, rle_mask_workspace(rle)),
                     second = scratch(stream, zvc_decompress_workspace(zvc));
  copy(list.get(), runs(), 4 * (n_ + 1), cudaMemcpyHostToDevice, stream);
  rle_mask(rle, first.get(), stream.stream());
  zvc_decompress(zvc, second.get(), kBlocksIn, stream.stream());
  return stream;
}

}  // namespace weft::offload
