// A whole training step in one persistent kernel, and what such kernels take; csrc/vertex/exec/cuda/training.jit.cuh.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/jit/python/pybind.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "common/tensor.h"
#include "jit/jit.h"
#include "vertex/exec/cuda/counters.h"
#include "vertex/exec/cuda/persistent.h"
#include "vertex/exec/vertex_frontiers.h"
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

// The loss and whether the step was refused, on the device; false where the blocks are not resident after all.
std::tuple<bool, at::Tensor> train_step(const torch::jit::Object& object, const std::vector<at::Tensor>& inputs,
                                        const std::vector<at::Tensor>& matrices, const std::vector<at::Tensor>& vectors,
                                        const at::Tensor& schedule, const at::Tensor& host_schedule,
                                        const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                                        bool cross_entropy, int32_t classes, const std::optional<at::Tensor>& roots,
                                        const at::Tensor& targets, int64_t ignore_index,
                                        const std::vector<GivenUpdate>& updates, const at::Tensor& refused) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  const c10::cuda::CUDAGuard guard(schedule.device());
  const cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  const at::Tensor wanted = targets.contiguous();
  const int64_t rows = cross_entropy ? wanted.numel() : wanted.numel() / std::max<int64_t>(1, classes);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(schedule.device());
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
  const at::Tensor result = at::empty({2}, options);
  TrainingArguments t{};
  t.targets = wanted.const_data_ptr();
  t.roots = roots ? reinterpret_cast<const long long*>(roots->const_data_ptr<int64_t>()) : nullptr;
  t.rows = static_cast<int>(rows);
  t.ignore_index = ignore_index;
  t.weight = floats_of(weight);
  t.bias = floats_of(bias);
  t.refused = static_cast<float*>(refused.mutable_data_ptr());
  t.result = static_cast<float*>(result.mutable_data_ptr());
  bool launched = false;
  run_training({inputs, matrices, vectors, schedule, host_schedule, program->program}, roots.has_value(), others,
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
  return {launched, result};
}

// Of a compiled kernel: blocks, registers of a thread, bytes of shared memory, whether all blocks are resident.
std::tuple<int, int, int64_t, bool> kernel_shape(const torch::jit::Object& object, int64_t pass, int32_t most_blocks,
                                                 int32_t matrices, int32_t vectors, bool cross_entropy, bool head,
                                                 int32_t classes) {
  const ProgramPointer program = c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
  const PersistentKernel& kernel =
      persistent_kernel(program->program, static_cast<Pass>(pass), most_blocks, multiplies_in_tf32(), matrices, vectors,
                        {cross_entropy, head, classes});
  return {kernel.blocks, kernel.kernel->registers(), kernel.shared_bytes, kernel.most_groups > 0};
}

}  // namespace

void bind_training(py::module_& vertex) {
  vertex.def("train", torch::wrap_pybind_function(&train_step), py::arg("program"), py::arg("inputs"),
             py::arg("matrices"), py::arg("vectors"), py::arg("schedule"), py::arg("host_schedule"), py::arg("weight"),
             py::arg("bias"), py::arg("cross_entropy"), py::arg("classes"), py::arg("roots"), py::arg("targets"),
             py::arg("ignore_index"), py::arg("updates"), py::arg("refused"),
             "Launches a training step; whether it did, and the loss and `refused` on the device.");
  vertex.def("persistent_shape", torch::wrap_pybind_function(&kernel_shape), py::arg("program"), py::arg("pass_"),
             py::arg("most_blocks"), py::arg("matrices"), py::arg("vectors") = 0, py::arg("cross_entropy") = true,
             py::arg("head") = false, py::arg("classes") = 0,
             "Blocks, registers of a thread, bytes of shared memory and residency of a kernel, which is compiled.");
}

}  // namespace weft::vertex
