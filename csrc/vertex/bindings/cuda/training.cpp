// A whole training step in one persistent kernel, and what such kernels take; csrc/vertex/exec/cuda/training.jit.cuh.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/jit/python/pybind.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "common/device.h"
#include "common/tensor.h"
#include "jit/jit.h"
#include "vertex/exec/cuda/counters.h"
#include "vertex/exec/cuda/persistent.h"
#include "vertex/exec/script.h"
#include "vertex/exec/vertex_frontiers.h"
#include "vertex/graph/graphs.h"
#include "vertex/graph/schedule.h"
#include "vertex/program/object.h"

namespace py = pybind11;

namespace weft::vertex {
namespace {

bool multiplies_in_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

// What happens to what is given, by its number among matrices and vectors, then the head's weight and bias.
using GivenUpdate =
    std::tuple<int64_t, int64_t, at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>, std::vector<double>>;

float* floats_of(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? static_cast<float*>(t->mutable_data_ptr()) : nullptr;
}

// The end of a step on the device.
class Launched {
 public:
  explicit Launched(std::shared_ptr<at::cuda::CUDAEvent> event, at::Tensor numbers)
      : event_(std::move(event)), numbers_(std::move(numbers)) {}
  bool query() const { return event_->query(); }
  void synchronize() const { event_->synchronize(); }
  const at::Tensor& numbers() const { return numbers_; }

 private:
  std::shared_ptr<at::cuda::CUDAEvent> event_;
  at::Tensor numbers_;
};

// Pinned memory that steps take in turns: a schedule with its script, which one copy takes to the device, and the loss
// and whether the step was refused, which the kernel writes there. So the host allocates nothing that waits for events,
// and copies nothing back.
class Turns {
 public:
  Turns() = default;
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  ~Turns() {
    for (const Turn& turn : turns_) {
      // At the end of the process there may be no device any more.
      if (turn.event->isCreated()) cudaEventSynchronize(turn.event->event());
    }
  }

  struct Turn {
    at::Tensor script, numbers;
    std::shared_ptr<at::cuda::CUDAEvent> event = std::make_shared<at::cuda::CUDAEvent>();
  };
  // Whose last step is over; room for `size` numbers of a script. The same until it is taken.
  Turn& next(size_t size) {
    Turn& turn = turns_[next_ % turns_.size()];
    turn.event->synchronize();
    if (!turn.numbers.defined()) turn.numbers = pinned(2, at::kFloat);
    if (!turn.script.defined() || turn.script.numel() < static_cast<int64_t>(size)) {
      turn.script = pinned(static_cast<int64_t>(size + size / 2), at::kInt);
    }
    return turn;
  }
  // By a step that was launched, whose numbers somebody waits for.
  void take() { ++next_; }

 private:
  static at::Tensor pinned(int64_t size, at::ScalarType type) {
    return at::empty({size}, at::TensorOptions().dtype(type).device(at::kCPU).pinned_memory(true));
  }
  std::array<Turn, 3> turns_;
  size_t next_ = 0;
};

// Where the roots of graphs are behind so many numbers.
size_t roots_begin(size_t size) {
  return (size + 1) / 2 * 2;
}
size_t with_roots(size_t size, const Graphs* graphs) {
  return graphs == nullptr ? size : roots_begin(size) + 2 * static_cast<size_t>(graphs->num_graphs());
}

// The script of a step behind the schedule's block, and its copy on the device, there with the roots of graphs.
std::pair<at::Tensor, at::Tensor> sent(Turns::Turn& turn, std::span<const int32_t> block,
                                       const std::vector<int32_t>& scripts, const Graphs* roots, at::Device device,
                                       cudaStream_t stream) {
  const size_t begin = scripts_begin(block), size = begin + scripts.size(), all = with_roots(size, roots);
  auto* const to = static_cast<int32_t*>(turn.script.mutable_data_ptr());
  std::memcpy(to, block.data(), block.size_bytes());
  std::fill(to + block.size(), to + begin, 0);
  std::memcpy(to + begin, scripts.data(), scripts.size() * sizeof(int32_t));
  const at::Tensor host = turn.script.narrow(0, 0, static_cast<int64_t>(size));
  if (roots != nullptr) roots->write_roots(reinterpret_cast<int64_t*>(to + roots_begin(size)));
  at::Tensor copy = at::empty({static_cast<int64_t>(all)}, at::TensorOptions().dtype(at::kInt).device(device));
  cuda_check(cudaMemcpyAsync(copy.mutable_data_ptr(), to, all * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  return {std::move(copy), host};
}

// Nothing where the blocks are not resident after all.
std::optional<Launched> train_step(Turns& turns, const torch::jit::Object& object, const Schedule& plan,
                                   int32_t most_blocks, const std::vector<at::Tensor>& inputs,
                                   const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& vectors,
                                   const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                                   bool cross_entropy, int32_t classes, const Graphs* roots, const at::Tensor& targets,
                                   int64_t ignore_index, const std::vector<GivenUpdate>& updates,
                                   const at::Tensor& refused) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  const c10::cuda::CUDAGuard guard(refused.device());
  const at::NoGradGuard no_grad;
  const auto current = at::cuda::getCurrentCUDAStream();
  const cudaStream_t stream = current;
  static constexpr std::array kTraining = {Pass::kTraining};
  const auto block = plan.block();
  const std::vector<int32_t> scripts = scripts_block(program->program, block, most_blocks, kTraining);
  const size_t size = scripts_begin(block) + scripts.size();
  Turns::Turn& turn = turns.next(with_roots(size, roots));
  const auto [copy, host_schedule] = sent(turn, block, scripts, roots, refused.device(), stream);
  const at::Tensor schedule = copy.narrow(0, 0, static_cast<int64_t>(size));
  const at::Tensor wanted = targets.contiguous();
  const int64_t rows = cross_entropy ? wanted.numel() : wanted.numel() / std::max<int64_t>(1, classes);
  const LossForm form{cross_entropy, weight.has_value(), classes};
  const auto count = static_cast<int32_t>(matrices.size()), of_vectors = static_cast<int32_t>(vectors.size());
  const size_t first_vector = std::max<size_t>(1, matrices.size());
  std::vector<UpdateArgument> all(first_vector + vectors.size() + 2);
  // Of the loss of each row, its gradient by what the head makes, and the parameters whose gradients have several
  // terms.
  const int64_t of_gradients = weight ? rows * classes : 0;
  int64_t others = rows + of_gradients;
  std::vector<std::pair<UpdateArgument*, int64_t>> partial;
  for (const auto& [number, kind, parameter, first, second, numbers] : updates) {
    TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(all.size()) && numbers.size() <= 8,
                      "train: an impossible update");
    for (const at::Tensor& t : {parameter, first.value_or(parameter), second.value_or(parameter)}) {
      TORCH_CHECK(t.is_contiguous(), "train: a parameter or its state is not contiguous any more");
    }
    UpdateArgument& u = all[number];
    u = {static_cast<float*>(parameter.mutable_data_ptr()),
         floats_of(first),
         floats_of(second),
         nullptr,
         {},
         static_cast<int>(kind)};
    std::copy(numbers.begin(), numbers.end(), u.numbers);
    const auto is_term = [&, n = number](const Step& s) {
      return s.kind == Step::Kind::kOuter ? s.matrix == n
                                          : s.kind == Step::Kind::kTotal && int64_t(first_vector) + s.vector == n;
    };
    const auto& steps = program->program.backward;
    if (std::count_if(steps.begin(), steps.end(), is_term) < 2) continue;
    partial.emplace_back(&u, others);
    others += parameter.numel();
  }
  TrainingArguments t{};
  t.targets = wanted.const_data_ptr();
  t.roots = roots == nullptr ? nullptr
                             : reinterpret_cast<const long long*>(copy.const_data_ptr<int32_t>() + roots_begin(size));
  t.rows = static_cast<int>(rows);
  t.ignore_index = ignore_index;
  t.weight = floats_of(weight);
  t.bias = floats_of(bias);
  t.refused = static_cast<float*>(refused.mutable_data_ptr());
  t.result = static_cast<float*>(turn.numbers.mutable_data_ptr());
  bool launched = false;
  const auto fill = [&](void* first, int byte, size_t bytes) {
    cuda_check(cudaMemsetAsync(first, byte, bytes, stream), "cudaMemsetAsync");
  };
  try {
    run_training({inputs, matrices, vectors, schedule, host_schedule, program->program}, roots != nullptr, others, fill,
                 [&](const Memory& memory, float* own) {
                   t.losses = own;
                   t.gradients = own + rows;
                   for (const auto& [update, first] : partial) update->partial = own + first;
                   const PersistentKernel& kernel =
                       persistent_kernel(program->program, Pass::kTraining, memory.most_blocks, multiplies_in_tf32(),
                                         count, of_vectors, form);
                   const Counters arrived = zeroed_counters(counters_of(memory));
                   launched = kernel.most_groups >= memory.groups &&
                              launch_persistent(kernel, memory, Pass::kTraining,
                                                reinterpret_cast<unsigned*>(arrived.first), stream, &t, all.data());
                 });
  } catch (...) {
    turn.event->record(current);  // the copy of the script is under way
    throw;
  }
  turn.event->record(current);
  if (!launched) return std::nullopt;
  turns.take();
  return Launched(turn.event, turn.numbers);
}

// Of a compiled kernel: blocks, registers of a thread, bytes of shared memory, how many groups are resident at once.
std::tuple<int, int, int64_t, int> kernel_shape(const torch::jit::Object& object, int64_t pass, int32_t most_blocks,
                                                int32_t matrices, int32_t vectors, bool cross_entropy, bool head,
                                                int32_t classes) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  const PersistentKernel& kernel =
      persistent_kernel(program->program, static_cast<Pass>(pass), most_blocks, multiplies_in_tf32(), matrices, vectors,
                        {cross_entropy, head, classes});
  return {kernel.blocks, kernel.kernel->registers(), kernel.shared_bytes, kernel.most_groups.load()};
}

// All of these kernels, each of a pass in groups of at most so many blocks, as many at a time as there are processors.
void compile_kernels(const torch::jit::Object& object, const std::vector<std::pair<int64_t, int32_t>>& kernels,
                     int32_t matrices, int32_t vectors, bool cross_entropy, bool head, int32_t classes) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  std::vector<jit::Request> requests;
  for (const auto& [pass, most_blocks] : kernels) {
    requests.push_back(persistent_request(program->program, static_cast<Pass>(pass), most_blocks, multiplies_in_tf32(),
                                          matrices, vectors, {cross_entropy, head, classes}));
  }
  const py::gil_scoped_release released;
  jit::cubins(requests);
}

}  // namespace

void bind_training(py::module_& vertex) {
  py::class_<Turns>(vertex, "Turns", "Pinned memory that training steps take in turns.").def(py::init<>());
  py::class_<Launched>(vertex, "Launched", "The end of a training step on the device.")
      .def("query", torch::wrap_pybind_function(&Launched::query))
      .def("synchronize", torch::wrap_pybind_function_no_gil(&Launched::synchronize))
      .def_property_readonly("numbers", torch::wrap_pybind_function(&Launched::numbers),
                             "The loss and `refused`, in pinned memory: until the third step after this one begins.");
  vertex.def("train", torch::wrap_pybind_function(&train_step), py::arg("turns"), py::arg("program"),
             py::arg("schedule"), py::arg("most_blocks"), py::arg("inputs"), py::arg("matrices"), py::arg("vectors"),
             py::arg("weight"), py::arg("bias"), py::arg("cross_entropy"), py::arg("classes"), py::arg("roots"),
             py::arg("targets"), py::arg("ignore_index"), py::arg("updates"), py::arg("refused"),
             "Launches a training step; nothing where its blocks are not resident.");
  vertex.def(
      "persistent_shape", torch::wrap_pybind_function(&kernel_shape), py::arg("program"), py::arg("pass_"),
      py::arg("most_blocks"), py::arg("matrices"), py::arg("vectors") = 0, py::arg("cross_entropy") = true,
      py::arg("head") = false, py::arg("classes") = 0,
      "Of a kernel, which is compiled: blocks, registers of a thread, bytes of shared memory, and how many groups "
      "are resident at once.");
  vertex.def("refused_launches", &refused_launches, "How many persistent kernels were refused a launch.");
  vertex.def("compile_persistent", torch::wrap_pybind_function(&compile_kernels), py::arg("program"),
             py::arg("kernels"), py::arg("matrices"), py::arg("vectors") = 0, py::arg("cross_entropy") = true,
             py::arg("head") = false, py::arg("classes") = 0,
             "Compiles kernels, each a pass and the most blocks of a group, at the same time.");
}

}  // namespace weft::vertex
