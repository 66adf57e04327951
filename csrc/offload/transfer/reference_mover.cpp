// The mover "reference": plain torch, synchronous; and the idle mover, which moves nothing.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <cstdlib>

#include "common/integers.h"
#include "offload/rle_compress.h"
#include "offload/transfer/mover.h"
#include "offload/zvc_compress.h"

namespace weft::offload {
namespace {

class HostEvent : public Event {
 public:
  bool completed() const override { return true; }

 private:
  double elapsed(const Event& earlier) const override {
    return std::chrono::duration<double>(now_ - static_cast<const HostEvent&>(earlier).now_).count();
  }

  std::chrono::steady_clock::time_point now_ = std::chrono::steady_clock::now();
};

// Runs below autograd, autocast and dispatch modes: hooks and modes see the program's operators alone.
struct Below {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard quiet{
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize}) |
      c10::autocast_dispatch_keyset};
};

at::Tensor view(const Bytes& b, at::ScalarType dtype) {
  const int64_t itemsize = int64_t(c10::elementSize(dtype));
  const auto backend = b.storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  at::Tensor x = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(b.storage), c10::DispatchKeySet(backend),
                                                          c10::scalarTypeToTypeMeta(dtype));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef{b.size() / itemsize}, at::IntArrayRef{1},
                                                 b.lo / itemsize);
  return x;
}

class ReferenceTransfer : public Transfer {
 public:
  // Codec::none and Codec::automatic send the bytes uncompressed where compression is not shorter.
  static std::shared_ptr<Transfer> out(HostPool& pool, const Bytes& from, Codec codec) {
    const Below below;
    auto transfer = std::make_shared<ReferenceTransfer>();
    at::Tensor first, second;
    if (codec != Codec::none && compressible(from)) {
      const bool runs = codec == Codec::rle;
      const at::Tensor x = view(from, from.dtype);
      const auto [index, values, size] = (runs ? rle_compress_op : zvc_compress_op)(x);
      const at::Tensor counts = size.reshape({-1}).cpu();
      first = runs ? index.narrow(0, 0, counts[0].item<int64_t>()) : index;
      second = values.narrow(0, 0, counts[-1].item<int64_t>());
      if (codec == Codec::automatic && int64_t(first.nbytes() + second.nbytes()) >= from.size())
        first = second = at::Tensor();
      transfer->elements_ = x.numel();
      transfer->runs_ = runs;
    }
    transfer->compressed = first.defined();
    if (!first.defined()) first = view(from, at::kByte);
    transfer->sent.fixed = int64_t(first.nbytes() + (second.defined() ? second.nbytes() : 0));
    transfer->returned = transfer->sent;
    transfer->buffer_ = pool.take(transfer->sent.fixed);
    if (transfer->buffer_ == nullptr) return nullptr;
    transfer->out_begin = std::make_shared<HostEvent>();
    auto* data = static_cast<char*>(transfer->buffer_->data());
    transfer->first_ = copy(data, first);
    if (second.defined()) transfer->second_ = copy(data + first.nbytes(), second);
    transfer->out_end = std::make_shared<HostEvent>();
    return transfer;
  }

  bool is_out(bool) override { return true; }
  void wait_out() override {}
  void start_in(const Bytes& to, const EventPtr&) override {
    const Below below;
    in_begin = std::make_shared<HostEvent>();
    if (!compressed) {
      view(to, at::kByte).copy_(first_);
    } else {
      const auto device = to.storage.device();
      const c10::SymInt shape[] = {elements_};
      view(to, to.dtype)
          .view(at::kByte)
          .copy_((runs_ ? rle_decompress_op : zvc_decompress_op)(first_.to(device), second_.to(device), shape)
                     .view(at::kByte));
    }
    here = in_end = std::make_shared<HostEvent>();
  }
  void wait_in(const c10::Storage&) override {}

 private:
  static at::Tensor copy(char* to, const at::Tensor& from) {
    at::Tensor host = at::from_blob(to, from.sizes(), from.options().device(at::kCPU));
    return host.copy_(from);
  }

  std::unique_ptr<HostPool::Buffer> buffer_;
  at::Tensor first_, second_;  // in the buffer: bytes; or mask or runs, and values
  int64_t elements_ = 0;
  bool runs_ = false;
};

void* allocate_plain(int64_t bytes) {
  if (refused(refusals().host)) return nullptr;
  return std::aligned_alloc(4096, size_t(ceil_div(bytes, 4096) * 4096));
}

class ReferenceMover : public Mover {
 public:
  explicit ReferenceMover(int64_t limit)
      : pool_(std::make_shared<HostPool>(HostMemory{allocate_plain, [](void* data, const auto&) { std::free(data); }},
                                         limit)) {}
  bool moves(c10::Device) const override { return true; }
  bool asynchronous() const override { return false; }
  bool capturing(c10::Device device) const override { return capturing_stream(device); }
  EventPtr record(c10::Device) override { return std::make_shared<HostEvent>(); }
  std::shared_ptr<Transfer> out(const Bytes& from, Codec codec, const EventPtr&, double, double) override {
    return ReferenceTransfer::out(*pool_, from, codec);
  }
  Count count(const Bytes& bytes) override {
    const Below below;
    const at::Tensor bits = view(bytes, c10::elementSize(bytes.dtype) == 4 ? at::kInt : at::kShort);
    return {bits.numel(), std::make_shared<int64_t>(bits.ne(0).sum().item<int64_t>())};
  }
  c10::Storage allocate(c10::Device device, int64_t bytes) override {
    const Below below;
    TORCH_CHECK_WITH(OutOfMemoryError, !refused(refusals().device), "offload: out of memory, for a test");
    return at::empty({bytes}, at::TensorOptions(device).dtype(at::kByte)).storage();
  }
  int64_t host_bytes() const override { return pool_->held(); }
  int64_t host_peak_bytes() const override { return pool_->peak(); }
  int64_t host_allocations() const override { return pool_->allocations(); }
  int64_t release() override { return pool_->release(); }
  void close() override { pool_->close(); }

 private:
  std::shared_ptr<HostPool> pool_;
};

class IdleMover : public Mover {
 public:
  bool moves(c10::Device) const override { return false; }
  bool asynchronous() const override { return false; }
  bool capturing(c10::Device) const override { return false; }
  EventPtr record(c10::Device) override { return std::make_shared<HostEvent>(); }
  std::shared_ptr<Transfer> out(const Bytes&, Codec, const EventPtr&, double, double) override { return nullptr; }
  Count count(const Bytes&) override { return {}; }
  c10::Storage allocate(c10::Device, int64_t) override { return {}; }
  int64_t host_bytes() const override { return 0; }
  int64_t host_peak_bytes() const override { return 0; }
  int64_t release() override { return 0; }
  void close() override {}
};

}  // namespace

bool compressible(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

bool compressible(const Bytes& b) {
  const int64_t itemsize = int64_t(c10::elementSize(b.dtype));
  return compressible(b.dtype) && b.lo % itemsize == 0 && b.size() % itemsize == 0;
}

#ifndef WEFT_WITH_CUDA
bool capturing_stream(c10::Device) {
  return false;
}
#endif

Refusals& refusals() {
  static Refusals all;
  return all;
}

EventPtr host_event() {
  return std::make_shared<HostEvent>();
}
std::shared_ptr<Mover> make_reference_mover(int64_t pool_limit) {
  return std::make_shared<ReferenceMover>(pool_limit);
}
std::shared_ptr<Mover> make_idle_mover() {
  return std::make_shared<IdleMover>();
}

}  // namespace weft::offload
