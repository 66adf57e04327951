// What autograd calls: a saved tensor packed into what its graph holds, and back; the version it was saved at.
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <sstream>
#include <typeinfo>

#include "offload/ledger.h"

namespace weft::offload {
namespace {

namespace impl = torch::autograd::impl;

// The object that counts versions: two tensors share it or not. It lives as long as a VariableVersion refers to it.
const void* identity(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "one pointer to the counter");
  const void* address;
  std::memcpy(&address, &counter, sizeof address);
  return address;
}

// Whether autograd sees a view of something that requires grad.
bool is_view(const at::Tensor& x) {
  const auto* meta = impl::get_view_autograd_meta(x);
  return meta != nullptr && meta->has_bw_view() && meta->get_backward_view().base_.requires_grad();
}

// torch 2.15 names a node after the operation in its messages, 2.11 by its own name.
template <typename Node>
constexpr bool kForwardNames = requires(const Node& node) {
  node.forward_op_name();
};

template <typename Node>
std::string shown_name(const Node& node) {
  if constexpr (kForwardNames<Node>) {
    return node.forward_op_name();
  } else {
    return node.name();
  }
}

}  // namespace

Witness::Witness(const at::Tensor& x)
    : counter_(impl::version_counter(x)),
      version_(counter_.enabled() ? counter_.current_version() : 0),
      output_nr_(uint32_t(x.output_nr())),
      original_(x.getIntrusivePtr()),
      producer_(x.is_leaf() ? nullptr : x.grad_fn().get()),
      view_(is_view(x)) {}

bool Witness::same(const Witness& other) const {
  return counter_.enabled() && identity(counter_) == identity(other.counter_) && version_ == other.version_;
}

void Witness::complain(const std::string& type, const std::string& sizes) const {
  std::ostringstream message;
  message << "one of the variables needed for gradient computation has been modified by an inplace operation: [" << type
          << ' ' << sizes << ']';
  // An output is named after the node that is being evaluated, which made it; what came in after the node that made
  // what it is now.
  // A view that is gone would have got a new node.
  auto node = torch::autograd::get_current_node();
  std::string name;
  if (producer_ != nullptr && node.get() == producer_) {
    name = shown_name(*node);
  } else if (auto original = original_.lock()) {
    node = at::Tensor(std::move(original)).grad_fn();
    if (node != nullptr) name = shown_name(*node);
  } else if (view_) {
    name = kForwardNames<torch::autograd::Node> ? "AsStrided" : "AsStridedBackward0";
  }
  if (!name.empty()) message << ", which is output " << output_nr_ << " of " << name << ',';
  message << " is at version " << counter_.current_version() << "; expected version " << version_ << " instead.";
  if (torch::autograd::AnomalyMode::is_enabled())
    message
        << " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable "
           "in question was changed in there or anywhere later. Good luck!";
  else
    message << " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
               "torch.autograd.set_detect_anomaly(True, check_nan=False).";
  throw std::runtime_error(message.str());
}

// ---- Packed

Packed::~Packed() {
  if (blocks.empty()) return;
  std::shared_ptr<Use> use = blocks.front()->use;
  int64_t unread = 0;
  if (!read)
    for (auto& block : blocks) {
      auto at = root(block);
      --at->unread, ++unread;
      if (at->unread == 0 && !at->arriving) at->held = {};
    }
  blocks.clear();
  try {
    use->dropped(unread);
  } catch (...) {  // the device is gone
  }
}

// ---- Use, Engine

namespace {

// Whether the dimensions have names, which torch 2.15 no longer knows.
template <typename Impl>
bool named(const Impl& t) {
  if constexpr (requires { t.has_named_tensor_meta(); }) {
    return t.has_named_tensor_meta();
  } else {
    return false;
  }
}

bool plain(PyObject* object, const at::Tensor& x) {
  using c10::DispatchKey;
  const c10::TensorImpl& t = *x.unsafeGetTensorImpl();
  if (typeid(t) != typeid(c10::TensorImpl) || !THPVariable_CheckExact(object)) return false;
  if (x.layout() != at::kStrided || !(x.is_cpu() || x.is_cuda()) || t.has_symbolic_sizes_strides()) return false;
  if (x.key_set().has_any(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::ZeroTensor,
                                               DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper})))
    return false;
  return x.has_storage() && !named(t) && x.storage().data() != nullptr;
}

Range bytes_of(const at::Tensor& x) {
  int64_t elements = 1;
  for (int64_t d = 0; d < x.dim(); ++d) elements += (x.size(d) - 1) * x.stride(d);
  const int64_t lo = x.storage_offset() * int64_t(x.itemsize());
  return {lo, lo + elements * int64_t(x.itemsize())};
}

// Shares memory and version counter with x, and has no history: what a graph holds must not hold the graph.
at::Tensor shared(const at::Tensor& x) {
  return at::Tensor(x.unsafeGetTensorImpl()->shallow_copy_and_detach(impl::version_counter(x), true));
}

bool parameter(const at::TensorBase& x) {
  return x.requires_grad() && x.is_leaf();
}

// Whether it is a torch.nn.Parameter that requires no grad, or a view of one: the program holds it anyway, and what
// shards parameters frees and refills their storages.
bool frozen(PyObject* object, const at::Tensor& x) {
  const auto is_parameter = [](PyObject* tensor) {
    return PyType_IsSubtype(Py_TYPE(tensor), reinterpret_cast<PyTypeObject*>(ParameterClass));
  };
  if (!x.is_view()) return is_parameter(object);
  const at::Tensor base(x._base());
  return base.is_leaf() && is_parameter(py::cast(base).ptr());
}

}  // namespace

Use::Use(std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<const Schedule>> schedules, bool timed,
         bool counts)
    : engine(std::move(engine)), timed(timed), counts(counts), schedules_(std::move(schedules)) {}

Ledger& Use::ledger(c10::Device device) {
  for (auto& ledger : ledgers)
    if (ledger->account.device == device) return *ledger;
  const auto it = schedules_.find(device.is_cpu() ? -1 : device.index());
  ledgers.push_back(
      std::make_unique<Ledger>(*engine, *this, engine->account(device), it == schedules_.end() ? nullptr : it->second));
  return *ledgers.back();
}

std::unique_ptr<Packed> Use::pack(PyObject* object) {
  const at::Tensor& x = THPVariable_Unpack(object);
  auto packed = std::make_unique<Packed>(x);
  if (!plain(object, x)) {
    keep(*packed, object, x);
    return packed;
  }
  const bool leaf = parameter(x);
  if (x.numel() == 0) {
    packed->tensor = leaf ? x : shared(x);
    return packed;
  }
  const Range range = bytes_of(x);
  const c10::Device device = x.device();
  Ledger& books = ledger(device);
  if (leaf || (x.is_view() && parameter(x._base())) || books.is_parameter(x, range)) {
    if (leaf) books.parameter(x, range);
    packed->tensor = leaf ? x : shared(x);
    return packed;
  }
  const bool capturing = books.look();
  const bool aligned = reinterpret_cast<uintptr_t>(x.storage().data()) % x.itemsize() == 0;
  const bool uncounted = frozen(object, x);
  auto block = books.save(
      x, range, packed->witness,
      engine->mover->moves(device) && !capturing && aligned && engine->mover->holds(x.storage()) && !uncounted,
      uncounted);
  ++block->unread;
  ++unread_;
  packed->blocks.push_back(std::move(block));
  packed->range = range;
  packed->keys = x.key_set();
  packed->dtype = x.dtype();
  packed->sizes = x.sizes();
  packed->strides = x.strides();
  return packed;
}

// What is no plain tensor stays as it is; the memory of its parts is counted.
void Use::keep(Packed& packed, PyObject* object, const at::Tensor& x) {
  const auto handle = py::handle(object);
  packed.tensor = parameter(x) ? x : handle.attr("detach")().cast<at::Tensor>();
  if (parameter(x)) return;
  std::vector<at::Tensor> parts;
  if (py::hasattr(handle, "__tensor_flatten__")) {
    const py::list names = py::tuple(handle.attr("__tensor_flatten__")())[0];
    for (auto name : names) parts.push_back(py::getattr(handle, name).cast<at::Tensor>());
  } else if (x.key_set().has(c10::DispatchKey::Python)) {
    return;
  } else if (x.layout() == at::kSparse) {
    parts = {x._indices(), x._values()};
  } else if (at::sparse_csr::is_sparse_compressed(x)) {
    auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(x);
    parts = {compressed, plain, x.values()};
  } else if (x.layout() == at::kStrided && x.has_storage()) {
    parts = {x};
  }
  for (const at::Tensor& part : parts) {
    if (!part.has_storage() || part.numel() == 0 || part.is_meta() || part.storage().data() == nullptr) continue;
    const auto bytes = int64_t(part.storage().nbytes());
    Ledger& books = ledger(part.device());
    books.look();
    auto block = books.save(part, {0, bytes}, Witness(part), false);
    ++block->unread;
    ++unread_;
    packed.blocks.push_back(std::move(block));
  }
}

at::Tensor Use::unpack(Packed& packed) {
  if (packed.witness.changed()) {
    const at::Tensor x =
        packed.tensor.defined()
            ? packed.tensor
            : at::empty({0}, at::TensorOptions(packed.dtype).device(root(packed.blocks[0])->ledger.account.device));
    std::ostringstream sizes;
    sizes << (packed.tensor.defined() ? packed.tensor.sizes() : at::IntArrayRef(packed.sizes));
    packed.witness.complain(torch::processErrorMsg(x.toString()), sizes.str());
  }
  if (packed.tensor.defined()) {
    for (auto& block : packed.blocks) {
      auto at = root(block);
      at->ledger.read_kept(*at, packed);
      if (!packed.read) --at->unread, --unread_;
    }
    packed.read = true;
    check();
    return packed.tensor;
  }
  const bool first = !packed.read;
  auto block = root(packed.blocks[0]);
  int64_t offset;
  c10::Storage storage;
  try {
    storage = block->ledger.read(*block, packed, &offset);
  } catch (...) {
    if (finished_) block->ledger.give_back();
    throw;
  }
  if (first) --unread_;
  check();
  if (finished_) block->ledger.give_back();
  at::Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), packed.keys, packed.dtype);
  c10::TensorImpl& t = *x.unsafeGetTensorImpl();
  t.set_sizes_and_strides(packed.sizes, packed.strides, (packed.range.lo + offset) / int64_t(packed.dtype.itemsize()));
  // A later change of the saved tensor is one of this one, as without hooks.
  t.set_version_counter(packed.witness.counter());
  return x;
}

void Use::dropped(int64_t unread) {
  unread_ -= unread;
  if (unread_ == 0)
    for (auto& ledger : ledgers) ledger->end();
  check();
}

void Use::check() {
  if (finished_ || !exited_ || unread_ > 0) return;
  finished_ = true;
  for (auto& ledger : ledgers) ledger->finish();
}

void Use::exit() {
  exited_ = true;
  for (auto& ledger : ledgers) ledger->exit();
  check();
}

Account& Engine::account(c10::Device device) {
  for (auto& account : accounts)
    if (account->device == device) return *account;
  accounts.push_back(std::make_unique<Account>(device, !device.is_cpu() || mover->moves(device)));
  return *accounts.back();
}

}  // namespace weft::offload
