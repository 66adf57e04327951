// The hooks that autograd calls for a saved tensor, and the check of its version.
#include <ATen/SavedTensorHooks.h>
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

#include "offload/tracker/tracker.h"

namespace weft::offload {
namespace {

namespace impl = torch::autograd::impl;

// The address of the version counter, which tensors may share. It is valid while a VariableVersion refers to it.
const void* identity(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "one pointer to the counter");
  const void* address;
  std::memcpy(&address, &counter, sizeof address);
  return address;
}

// Whether it is a differentiable view of a tensor that requires grad.
bool is_view(const at::Tensor& x) {
  const auto* meta = impl::get_view_autograd_meta(x);
  return meta != nullptr && meta->has_bw_view() && meta->get_backward_view().base_.requires_grad();
}

// In messages torch 2.15 calls a node by its operation's name, 2.11 by its own.
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

VersionCheck::VersionCheck(const at::Tensor& x)
    : counter_(impl::version_counter(x)),
      version_(counter_.enabled() ? counter_.current_version() : 0),
      output_nr_(uint32_t(x.output_nr())),
      original_(x.getIntrusivePtr()),
      producer_(x.is_leaf() ? nullptr : x.grad_fn().get()),
      view_(is_view(x)) {}

bool VersionCheck::same(const VersionCheck& other) const {
  return counter_.enabled() && identity(counter_) == identity(other.counter_) && version_ == other.version_;
}

void VersionCheck::raise_error(const std::string& type, const std::string& sizes) const {
  std::ostringstream message;
  message << "one of the variables needed for gradient computation has been modified by an inplace operation: [" << type
          << ' ' << sizes << ']';
  // torch names the node that is being evaluated if it produced the tensor, else the node that the tensor has now. A
  // view that is gone would have got a new node.
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

// Whether the dimensions have names; torch 2.15 has none.
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

// Shares memory and version counter with x but has no history: a graph must not hold a tensor that holds the graph.
at::Tensor shared(const at::Tensor& x) {
  return at::Tensor(x.unsafeGetTensorImpl()->shallow_copy_and_detach(impl::version_counter(x), true));
}

bool parameter(const at::TensorBase& x) {
  return x.requires_grad() && x.is_leaf();
}

// Whether it is a torch.nn.Parameter that requires no grad, or a view of one: the program holds it anyway, and sharding
// frees and refills its storage.
bool frozen(PyObject* object, const at::Tensor& x) {
  const auto is_parameter = [](PyObject* tensor) {
    return PyType_IsSubtype(Py_TYPE(tensor), reinterpret_cast<PyTypeObject*>(ParameterClass));
  };
  if (!x.is_view()) return is_parameter(object);
  const at::Tensor base(x._base());
  return base.is_leaf() && is_parameter(py::cast(base).ptr());
}

}  // namespace

Use::Use(std::shared_ptr<Engine> engine, std::map<int, std::shared_ptr<const TransferPlan>> plans, bool timed,
         double counting_seconds, int64_t counts_from, int64_t every, bool unhooks)
    : engine(std::move(engine)),
      timed(timed),
      counting_seconds(counting_seconds),
      counts_from(counts_from),
      every_(every),
      unhooks_(unhooks),
      plans_(std::move(plans)) {}

Tracker& Use::tracker(c10::Device device) {
  for (auto& tracker : trackers)
    if (tracker->residency.device == device) return *tracker;
  const auto it = plans_.find(device.is_cpu() ? -1 : device.index());
  trackers.push_back(
      std::make_unique<Tracker>(*engine, *this, engine->residency(device), it == plans_.end() ? nullptr : it->second));
  return *trackers.back();
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
  Tracker& own = tracker(device);
  if (leaf || (x.is_view() && parameter(x._base())) || own.is_parameter(x, range)) {
    if (leaf) own.parameter(x, range);
    packed->tensor = leaf ? x : shared(x);
    return packed;
  }
  own.look();
  const bool aligned = reinterpret_cast<uintptr_t>(x.storage().data()) % x.itemsize() == 0;
  const bool uncounted = frozen(object, x);
  // What is part of so little memory does not move, captured or not.
  const bool small = int64_t(x.storage().nbytes()) < engine->settings.min_bytes;
  const bool may_move = engine->mover->moves(device) && aligned && engine->mover->holds(x.storage()) && !uncounted &&
                        (small || own.stays() || !own.capturing());
  auto block = own.save(x, range, packed->version, may_move, uncounted);
  ++block->unread;
  ++unread_;
  packed->blocks.push_back(std::move(block));
  packed->range = range;
  packed->keys = x.key_set();
  packed->dtype = x.dtype();
  packed->sizes = x.sizes();
  packed->strides = x.strides();
  if (unhooks_ && own.done_moving()) unhook(own);
  return packed;
}

void Use::unhook(Tracker& tracker) {
  if (unhooked_ || std::this_thread::get_id() != entered_ || torch::autograd::get_current_graph_task_id() != -1) return;
  taken_.emplace(at::SavedTensorDefaultHooks::pop_hooks());
  if (at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true)) return rehook();
  unhooked_ = true;
  tracker.unhook();
}

void Use::rehook() {
  if (!taken_) return;
  Hooks hooks = std::move(*taken_);
  taken_.reset();
  // Who saved and restored the state of the thread has put them back.
  const auto* interpreter = &hooks.first.pyinterpreter();
  const auto found = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true);
  if (found && found->first.ptr(interpreter) == hooks.first.ptr(interpreter)) return;
  at::SavedTensorDefaultHooks::push_hooks(std::move(hooks.first), std::move(hooks.second));
}

// Keeps what is no plain tensor; the memory of its parts is counted.
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
    Tracker& own = tracker(part.device());
    own.look();
    auto block = own.save(part, {0, bytes}, VersionCheck(part), false);
    ++block->unread;
    ++unread_;
    packed.blocks.push_back(std::move(block));
  }
}

at::Tensor Use::unpack(Packed& packed) {
  if (packed.version.changed()) {
    const at::Tensor x =
        packed.tensor.defined()
            ? packed.tensor
            : at::empty({0}, at::TensorOptions(packed.dtype).device(root(packed.blocks[0])->tracker.residency.device));
    std::ostringstream sizes;
    sizes << (packed.tensor.defined() ? packed.tensor.sizes() : at::IntArrayRef(packed.sizes));
    packed.version.raise_error(torch::processErrorMsg(x.toString()), sizes.str());
  }
  if (packed.tensor.defined()) {
    for (auto& block : packed.blocks) {
      auto at = root(block);
      at->tracker.read_kept(*at, packed);
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
    storage = block->tracker.read(*block, packed, &offset);
  } catch (...) {
    if (finished_) block->tracker.give_back();
    throw;
  }
  if (first) --unread_;
  check();
  if (finished_) block->tracker.give_back();
  at::Tensor x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), packed.keys, packed.dtype);
  c10::TensorImpl& t = *x.unsafeGetTensorImpl();
  t.set_sizes_and_strides(packed.sizes, packed.strides, (packed.range.lo + offset) / int64_t(packed.dtype.itemsize()));
  // Changing the saved tensor in place changes this one, as without hooks.
  t.set_version_counter(packed.version.counter());
  return x;
}

void Use::dropped(int64_t unread) {
  unread_ -= unread;
  if (unread_ == 0)
    for (auto& tracker : trackers) tracker->end();
  check();
}

void Use::check() {
  if (finished_ || !exited_ || unread_ > 0) return;
  finished_ = true;
  for (auto& tracker : trackers) tracker->finish();
}

void Use::exit() {
  exited_ = true;
  for (auto& tracker : trackers) tracker->exit();
  check();
}

Residency& Engine::residency(c10::Device device) {
  for (auto& residency : residencies)
    if (residency->device == device) return *residency;
  residencies.push_back(std::make_unique<Residency>(device, !device.is_cpu() || mover->moves(device)));
  return *residencies.back();
}

}  // namespace weft::offload
