// A whole training step in one persistent kernel, and what such kernels take; csrc/vertex/exec/cuda/training.jit.cuh.
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
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "common/cuda/tf32.h"
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

// What happens to what is given, by its number among matrices and vectors, then the head's weight and bias: kind,
// parameter, what the optimizer keeps of it, and which numbers of a step are its.
using GivenUpdate =
    std::tuple<int64_t, int64_t, at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>, size_t>;

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

// Memory that steps take in turns: a schedule with its script in pinned memory, which one copy takes to the device's,
// and the loss and whether the step was refused, which the kernel writes to pinned memory. So the host allocates
// nothing that waits for events, and copies nothing back.
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
    at::Tensor script, numbers, on_device;
    std::shared_ptr<at::cuda::CUDAEvent> event = std::make_shared<at::cuda::CUDAEvent>();
  };
  // Whose last step is over; room for `size` numbers of a script. The same until it is taken.
  Turn& next(size_t size, at::Device device) {
    Turn& turn = turns_[next_ % turns_.size()];
    turn.event->synchronize();
    if (!turn.numbers.defined()) turn.numbers = pinned(2, at::kFloat);
    if (!turn.script.defined() || turn.script.numel() < static_cast<int64_t>(size)) {
      const auto room = static_cast<int64_t>(size + size / 2);
      turn.script = pinned(room, at::kInt);
      turn.on_device = at::empty({room}, at::TensorOptions().dtype(at::kInt).device(device));
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

// The script of a step behind the schedule's block, on the host and its copy on the device, there with the roots of
// graphs behind both.
std::pair<at::Tensor, at::Tensor> sent(const Turns::Turn& turn, std::span<const int32_t> block,
                                       const std::vector<int32_t>& scripts, const Graphs* roots, cudaStream_t stream) {
  const size_t begin = scripts_begin(block), size = begin + scripts.size(), all = with_roots(size, roots);
  auto* const to = static_cast<int32_t*>(turn.script.mutable_data_ptr());
  std::memcpy(to, block.data(), block.size_bytes());
  std::fill(to + block.size(), to + begin, 0);
  std::memcpy(to + begin, scripts.data(), scripts.size() * sizeof(int32_t));
  if (roots != nullptr) roots->write_roots(reinterpret_cast<int64_t*>(to + roots_begin(size)));
  cuda_check(
      cudaMemcpyAsync(turn.on_device.mutable_data_ptr(), to, all * sizeof(int32_t), cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync");
  const auto part = [&](const at::Tensor& t) { return t.narrow(0, 0, static_cast<int64_t>(size)); };
  return {part(turn.script), part(turn.on_device)};
}

// What the steps of a Trainer have in common as long as their tensors are the same.
class TrainingSteps {
 public:
  TrainingSteps(const torch::jit::Object& object, std::vector<at::Tensor> matrices, std::vector<at::Tensor> vectors,
                std::optional<at::Tensor> weight, std::optional<at::Tensor> bias, bool cross_entropy, int32_t classes,
                std::vector<GivenUpdate> updates)
      : program_(c10::IValue(object._ivalue()).toCustomClass<ProgramObject>()),
        matrices_(std::move(matrices)),
        vectors_(std::move(vectors)),
        weight_(std::move(weight)),
        bias_(std::move(bias)),
        form_{cross_entropy, weight_.has_value(), classes},
        updates_(std::move(updates)),
        several_terms_(updates_.size()) {
    for (size_t i = 0; i < updates_.size(); ++i) {
      const int64_t number = std::get<0>(updates_[i]);
      TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(first_vector() + vectors_.size() + 2),
                        "train: an impossible update");
      const auto is_term = [&](const Step& s) {
        return s.kind == Step::Kind::kOuter
                   ? s.matrix == number
                   : s.kind == Step::Kind::kTotal && static_cast<int64_t>(first_vector()) + s.vector == number;
      };
      const auto& steps = program_->program.backward;
      several_terms_[i] = std::count_if(steps.begin(), steps.end(), is_term) > 1;
    }
  }

  // Launches one; nothing where the blocks are not resident after all.
  std::optional<Launched> launch(Turns& turns, const Schedule& plan, int32_t most_blocks,
                                 const std::vector<at::Tensor>& inputs, const Graphs* roots, const at::Tensor& targets,
                                 int64_t ignore_index, const std::vector<std::vector<double>>& numbers,
                                 const at::Tensor& refused) const {
    const Program& program = program_->program;
    const c10::cuda::CUDAGuard guard(refused.device());
    const at::NoGradGuard no_grad;
    const auto current = at::cuda::getCurrentCUDAStream();
    const cudaStream_t stream = current;
    static constexpr std::array kTraining = {Pass::kTraining};
    const auto block = plan.block();
    const std::vector<int32_t> scripts = scripts_block(program, block, most_blocks, kTraining);
    const size_t size = scripts_begin(block) + scripts.size();
    const at::Tensor wanted = targets.contiguous();
    const int64_t rows = form_.cross_entropy ? wanted.numel() : wanted.numel() / std::max<int64_t>(1, form_.classes);
    std::vector<UpdateArgument> all(first_vector() + vectors_.size() + 2);
    // Of the loss of each row, its gradient by what the head makes, and the parameters whose gradients have several
    // terms.
    int64_t others = rows + (form_.head ? rows * form_.classes : 0);
    const std::vector<std::pair<UpdateArgument*, int64_t>> partial = take_updates(all, numbers, others);
    Turns::Turn& turn = turns.next(with_roots(size, roots), refused.device());
    const auto [host_schedule, schedule] = sent(turn, block, scripts, roots, stream);
    TrainingArguments t{};
    t.targets = wanted.const_data_ptr();
    t.roots = roots == nullptr
                  ? nullptr
                  : reinterpret_cast<const long long*>(turn.on_device.const_data_ptr<int32_t>() + roots_begin(size));
    t.rows = static_cast<int>(rows);
    t.ignore_index = ignore_index;
    t.weight = floats_of(weight_);
    t.bias = floats_of(bias_);
    t.refused = static_cast<float*>(refused.mutable_data_ptr());
    t.result = static_cast<float*>(turn.numbers.mutable_data_ptr());
    bool launched = false;
    const auto fill = [&](void* first, int byte, size_t bytes) {
      cuda_check(cudaMemsetAsync(first, byte, bytes, stream), "cudaMemsetAsync");
    };
    try {
      run_training({inputs, matrices_, vectors_, schedule, host_schedule, program}, roots != nullptr, others, fill,
                   [&](const Memory& memory, float* own) {
                     t.losses = own;
                     t.gradients = own + rows;
                     for (const auto& [update, first] : partial) update->partial = own + first;
                     const PersistentKernel& kernel = persistent_kernel(
                         program, Pass::kTraining, memory.most_blocks, takes_tf32(at::Float32Op::MATMUL),
                         static_cast<int32_t>(matrices_.size()), static_cast<int32_t>(vectors_.size()), form_);
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

 private:
  size_t first_vector() const { return std::max<size_t>(1, matrices_.size()); }

  // The updates of a step as its kernel takes them. Of those whose gradients have several terms, where there is room
  // for them among `others` floats, which grow.
  std::vector<std::pair<UpdateArgument*, int64_t>> take_updates(std::vector<UpdateArgument>& all,
                                                                const std::vector<std::vector<double>>& numbers,
                                                                int64_t& others) const {
    std::vector<std::pair<UpdateArgument*, int64_t>> partial;
    for (size_t i = 0; i < updates_.size(); ++i) {
      const auto& [number, kind, parameter, first, second, which] = updates_[i];
      TORCH_CHECK_VALUE(which < numbers.size() && numbers[which].size() <= std::size(all[number].numbers),
                        "train: an update without numbers");
      for (const at::Tensor* t : {&parameter, first ? &*first : &parameter, second ? &*second : &parameter}) {
        TORCH_CHECK(t->is_contiguous(), "train: a parameter or its state is not contiguous any more");
      }
      UpdateArgument& u = all[number];
      u = {static_cast<float*>(parameter.mutable_data_ptr()),
           floats_of(first),
           floats_of(second),
           nullptr,
           {},
           static_cast<int>(kind)};
      std::copy(numbers[which].begin(), numbers[which].end(), u.numbers);
      if (!several_terms_[i]) continue;
      partial.emplace_back(&u, others);
      others += parameter.numel();
    }
    return partial;
  }

  ProgramPointer program_;
  std::vector<at::Tensor> matrices_, vectors_;
  std::optional<at::Tensor> weight_, bias_;
  LossForm form_;
  std::vector<GivenUpdate> updates_;
  std::vector<bool> several_terms_;  // of the gradient, by update
};

// Of a compiled kernel: blocks, registers of a thread, bytes of shared memory, how many groups are resident at once.
std::tuple<int, int, int64_t, int> kernel_shape(const torch::jit::Object& object, int64_t pass, int32_t most_blocks,
                                                int32_t matrices, int32_t vectors, bool cross_entropy, bool head,
                                                int32_t classes) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  const PersistentKernel& kernel =
      persistent_kernel(program->program, static_cast<Pass>(pass), most_blocks, takes_tf32(at::Float32Op::MATMUL),
                        matrices, vectors, {cross_entropy, head, classes});
  return {kernel.blocks, kernel.kernel->registers(), kernel.shared_bytes, kernel.most_groups.load()};
}

TrainingSteps made_steps(const torch::jit::Object& object, std::vector<at::Tensor> matrices,
                         std::vector<at::Tensor> vectors, std::optional<at::Tensor> weight,
                         std::optional<at::Tensor> bias, bool cross_entropy, int32_t classes,
                         std::vector<GivenUpdate> updates) {
  return TrainingSteps(object, std::move(matrices), std::move(vectors), std::move(weight), std::move(bias),
                       cross_entropy, classes, std::move(updates));
}

// All of these kernels, each of a pass in groups of at most so many blocks, as many at a time as there are processors.
void compile_kernels(const torch::jit::Object& object, const std::vector<std::pair<int64_t, int32_t>>& kernels,
                     int32_t matrices, int32_t vectors, bool cross_entropy, bool head, int32_t classes) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  std::vector<jit::Request> requests;
  for (const auto& [pass, most_blocks] : kernels) {
    requests.push_back(persistent_request(program->program, static_cast<Pass>(pass), most_blocks,
                                          takes_tf32(at::Float32Op::MATMUL), matrices, vectors,
                                          {cross_entropy, head, classes}));
  }
  const py::gil_scoped_release released;
  jit::cubins(requests);
}

}  // namespace

void bind_training(py::module_& vertex) {
  py::class_<Turns>(vertex, "Turns", "Memory that training steps take in turns.").def(py::init<>());
  py::class_<Launched>(vertex, "Launched", "The end of a training step on the device.")
      .def("query", torch::wrap_pybind_function(&Launched::query))
      .def("synchronize", torch::wrap_pybind_function_no_gil(&Launched::synchronize))
      .def_property_readonly("numbers", torch::wrap_pybind_function(&Launched::numbers),
                             "The loss and `refused`, in pinned memory: until the third step after this one begins.");
  py::class_<TrainingSteps>(vertex, "TrainingSteps", "What steps have in common as long as their tensors are the same.")
      .def(py::init(torch::wrap_pybind_function(&made_steps)), py::arg("program"), py::arg("matrices"),
           py::arg("vectors"), py::arg("weight"), py::arg("bias"), py::arg("cross_entropy"), py::arg("classes"),
           py::arg("updates"))
      .def("launch", torch::wrap_pybind_function(&TrainingSteps::launch), py::arg("turns"), py::arg("schedule"),
           py::arg("most_blocks"), py::arg("inputs"), py::arg("roots"), py::arg("targets"), py::arg("ignore_index"),
           py::arg("numbers"), py::arg("refused"),
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
