// The frontiers of a compiled vertex function as Python calls them: one node of autograd's graph, whose backward pass
// needs no Python. Of a function in Python each call costs more than the launches of a small batch.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/api/object.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/custom_class.h>
#ifdef WEFT_WITH_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#ifdef WEFT_WITH_CUDA
#include "common/cuda/captured.h"
#include "common/device.h"
#include "common/saved_variables.h"
#endif
#include "vertex/exec/vertex_frontiers.h"
#include "vertex/graph/schedule.h"
#include "vertex/program/object.h"

namespace py = pybind11;

namespace weft::vertex {
namespace {

using Tensors = std::vector<at::Tensor>;

// What all calls of a program have in common; csrc/vertex/exec/vertex_frontiers.h. What is given: inputs, matrices,
// vectors.
struct Compiled {
  Compiled(ProgramPointer made, std::array<size_t, 3> sizes, size_t num_outputs, std::vector<size_t> without_gradient)
      : program(std::move(made)), counts(sizes), outputs(num_outputs), constant(std::move(without_gradient)) {
    const Program::Numbers& reads = program->program.reads;
    size_t first = 0;
    for (int which = 0; which < 3; ++which) {
      const auto& read = which == 0 ? reads.inputs : which == 1 ? reads.matrices : reads.vectors;
      for (size_t i = 0; i < counts[which]; ++i) {
        if (!std::binary_search(read.begin(), read.end(), static_cast<int32_t>(i))) unread.push_back(first + i);
      }
      first += counts[which];
    }
  }

  size_t num_given() const { return counts[0] + counts[1] + counts[2]; }
  at::TensorList part(at::TensorList given, int which) const {
    const size_t first = which == 0 ? 0 : which == 1 ? counts[0] : counts[0] + counts[1];
    return given.slice(first, counts[which]);
  }

  ProgramPointer program;
  std::array<size_t, 3> counts;
  size_t outputs;
  std::vector<size_t> constant;  // outputs that have no gradient
  std::vector<size_t> unread;    // numbers of what is given and the backward pass does not read
};

struct Call : torch::CustomClassHolder {
  std::shared_ptr<const Compiled> compiled;
  at::Tensor schedule, host_schedule;
  std::array<int64_t, 3> sizes;
  bool overlap, recorded;  // recorded: by autograd
  std::shared_ptr<PyObject> differentiable;
  // Of what is given, by its number, what gradients of gradients alone read: whether it changed is asked where they
  // are. The backward pass takes shape and dtype from `like`.
  struct Unread {
    size_t number;
    torch::autograd::SavedVariable saved;
    at::Tensor like;
  };
  std::vector<Unread> unread;

  // The outputs, and what backward reads beside what is given.
  std::pair<Tensors, Tensors> forward(at::TensorList given) const {
    Tensors results = vertex_frontiers_op(compiled->part(given, 0), compiled->part(given, 1), compiled->part(given, 2),
                                          schedule, host_schedule, compiled->program, sizes[0], sizes[1], sizes[2]);
    const auto end = results.begin() + static_cast<std::ptrdiff_t>(compiled->outputs);
    Tensors saved(std::make_move_iterator(end), std::make_move_iterator(results.end()));
    results.erase(end, results.end());
    return {std::move(results), std::move(saved)};
  }

  // Of what is given and `needed`, the gradients; `saved` as forward gave it.
  Tensors backward(at::TensorList grads, at::TensorList given, at::TensorList saved,
                   const std::vector<bool>& needed) const {
    const Program::Numbers& computed = compiled->program->program.gradients;
    std::array<std::vector<int64_t>, 3> wanted;
    std::vector<size_t> places;  // of the gradients among the results
    size_t first = 0;
    for (int which = 0; which < 3; ++which) {
      for (const int32_t i : which == 0 ? computed.inputs : which == 1 ? computed.matrices : computed.vectors) {
        if (!needed[first + i]) continue;
        wanted[which].push_back(i);
        places.push_back(first + i);
      }
      first += compiled->counts[which];
    }
    const Tensors found = vertex_frontiers_backward_op(grads, compiled->part(given, 0), compiled->part(given, 1),
                                                       compiled->part(given, 2), saved, schedule, host_schedule,
                                                       compiled->program, wanted[0], wanted[1], wanted[2], overlap);
    Tensors results(given.size());
    for (size_t i = 0; i < places.size(); ++i) results[places[i]] = found[i];
    return results;
  }

  // Takes out of `given` what `backward` does not read.
  void hold_unread(Tensors& given) {
    for (const size_t i : compiled->unread) {
      const at::Tensor x = std::exchange(given[i], at::Tensor());
      // Those of inference mode have no version that would tell of a change.
      torch::autograd::SavedVariable saved(x.is_inference() ? x.clone() : x, /*is_output=*/false);
      unread.push_back({i, std::move(saved), x.tensor_data()});
    }
  }

  // The gradients as functions that have gradients: the reference's, in Python.
  Tensors again(at::TensorList grads, at::TensorList given, const std::vector<bool>& needed) const {
    const py::gil_scoped_acquire acquired;
    const py::handle function(differentiable.get());
    const auto found = function(Tensors(given.begin(), given.end()), Tensors(grads.begin(), grads.end()), needed);
    Tensors results;
    for (const py::handle x : found) results.push_back(x.is_none() ? at::Tensor() : py::cast<at::Tensor>(x));
    return results;
  }
};

class Node : public torch::autograd::Function<Node> {
 public:
  static Tensors forward(torch::autograd::AutogradContext* ctx, const c10::intrusive_ptr<Call>& call,
                         at::TensorList given) {
    std::pair<Tensors, Tensors> found;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      found = call->forward(given);
    }
    auto& [results, made] = found;
    Tensors saved(given.begin(), given.end());
    if (call->recorded) call->hold_unread(saved);
    saved.insert(saved.end(), std::make_move_iterator(made.begin()), std::make_move_iterator(made.end()));
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    Tensors constant;
    for (const size_t i : call->compiled->constant) constant.push_back(results[i]);
    ctx->mark_non_differentiable(constant);
    return results;
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& grads) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    Tensors saved = saved_variables<Node>(ctx, "weft.VertexFunction");
    const size_t count = call->compiled->num_given();
    for (const auto& x : call->unread) saved[x.number] = at::GradMode::is_enabled() ? x.saved.unpack() : x.like;
    // As torch does with what is saved: an input that holds this node would keep both alive.
    if (!torch::autograd::get_current_graph_task_keep_graph()) call->unread.clear();
    const at::TensorList given = at::TensorList(saved).slice(0, count);
    std::vector<bool> needed(count);
    for (size_t i = 0; i < count; ++i) needed[i] = ctx->needs_input_grad(i);
    // The forward pass was recorded with its casts in it, for `again`, too.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Tensors found = at::GradMode::is_enabled()
                        ? call->again(grads, given, needed)
                        : call->backward(grads, given, at::TensorList(saved).slice(count), needed);
    Tensors results(1 + count);  // the first is the call's
    for (size_t i = 0; i < count; ++i) {
      if (needed[i]) results[1 + i] = std::move(found[i]);
    }
    return results;
  }
};

// Nodes are freed by any thread.
std::shared_ptr<PyObject> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* p) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire acquired;
            Py_DECREF(p);
          }};
}

Tensors run(const std::shared_ptr<Compiled>& compiled, const at::Tensor& schedule, const at::Tensor& host_schedule,
            std::array<int64_t, 3> sizes, bool overlap, py::object differentiable, const Tensors& given) {
  TORCH_CHECK_VALUE(given.size() == compiled->num_given(), "vertex_frontiers: got ", given.size(), " tensors");
  auto call = c10::make_intrusive<Call>();
  call->compiled = compiled;
  call->schedule = schedule;
  call->host_schedule = host_schedule;
  call->sizes = sizes;
  call->overlap = overlap;
  call->recorded = at::GradMode::is_enabled() &&
                   std::any_of(given.begin(), given.end(), [](const at::Tensor& x) { return x.requires_grad(); });
  call->differentiable = kept(std::move(differentiable));
  const py::gil_scoped_release released;
  return Node::apply(call, at::TensorList(given));
}

// The block in pinned memory. A copy by torch would wake all of its threads, which can take longer than the plan.
at::Tensor pinned(const Schedule& schedule) {
  const auto block = schedule.block();
  at::Tensor tensor = at::empty({static_cast<int64_t>(block.size())},
                                at::TensorOptions().dtype(at::kInt).device(at::kCPU).pinned_memory(true));
  std::memcpy(tensor.mutable_data_ptr(), block.data(), block.size_bytes());
  return tensor;
}

#ifdef WEFT_WITH_CUDA
// A copy of pinned memory on a device, which the host does not wait for, known to every stream that asks for it.
class Copy {
 public:
  Copy(const at::Tensor& host, at::Device device)
      : stream_(c10::cuda::getCurrentCUDAStream(device.index())), captured_(captures(stream_)) {
    const c10::cuda::CUDAGuard guard(stream_.device());
    copy_ = host.to(host.options().device(stream_.device()), /*non_blocking=*/true);
    // A graph that captures it keeps the memory, from which every replay copies.
    keep_while_captured(host, stream_);
    if (!captured_) made_.record(stream_);
  }

  // For the current stream.
  at::Tensor tensor() {
    const auto stream = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    if (stream != stream_ && !captures(stream)) {
      made_.block(stream);
      copy_.record_stream(stream);
    }
    return copy_;
  }

  // Whether it is there at replays alone.
  bool captured() const { return captured_; }

 private:
  static bool captures(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    cuda_check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  c10::cuda::CUDAStream stream_;
  bool captured_;
  at::Tensor copy_;
  at::cuda::CUDAEvent made_;
};
#endif

}  // namespace

void bind_frontiers(py::module_& vertex) {
  py::list instructions;
  for (const OpInfo& op : kOps)
    instructions.append(py::make_tuple(op.name, op.operands, op.elementwise, op.derivatives));
  vertex.attr("INSTRUCTIONS") = instructions;
  vertex.def("pinned", torch::wrap_pybind_function(&pinned), "The block of a schedule in pinned memory.");
#ifdef WEFT_WITH_CUDA
  py::class_<Copy>(vertex, "Copy", "A copy of pinned memory on a device, known to every stream that asks for it.")
      .def(py::init(torch::wrap_pybind_function(
          [](const at::Tensor& host, at::Device device) { return std::make_unique<Copy>(host, device); })))
      .def("tensor", torch::wrap_pybind_function(&Copy::tensor))
      .def_property_readonly("captured", &Copy::captured);
#endif
  py::class_<Compiled, std::shared_ptr<Compiled>>(vertex, "Frontiers",
                                                  "What all calls of vertex_frontiers for a program have in common.")
      .def(py::init([](const torch::jit::Object& program, std::array<size_t, 3> counts, size_t outputs,
                       std::vector<size_t> constant) {
             return std::make_shared<Compiled>(c10::IValue(program._ivalue()).toCustomClass<ProgramObject>(), counts,
                                               outputs, std::move(constant));
           }),
           py::arg("program"), py::arg("counts"), py::arg("outputs"), py::arg("constant"))
      // The outputs, differentiable; `differentiable(given, grads, needed)` gives gradients that have gradients.
      .def("__call__", torch::wrap_pybind_function(&run), py::arg("schedule"), py::arg("host_schedule"),
           py::arg("sizes"), py::arg("overlap"), py::arg("differentiable"), py::arg("given"));
}

}  // namespace weft::vertex
