// Scripts and partitions of persistent kernels, as Python asks for them.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/jit/python/pybind.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef WEFT_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "common/device.h"
#endif
#include "common/tensor.h"
#include "vertex/exec/expected.h"
#include "vertex/exec/persistent_source.h"
#include "vertex/exec/script.h"
#include "vertex/graph/schedule.h"
#include "vertex/program/object.h"
#include "vertex/program/partition.h"

namespace py = pybind11;

namespace weft::vertex {
namespace {

ProgramPointer program_of(const torch::jit::Object& object) {
  return c10::IValue(object._ivalue()).toCustomClass<ProgramObject>();
}

std::span<const int32_t> numbers_of(const at::Tensor& block) {
  TORCH_CHECK_VALUE(block.is_cpu() && block.is_contiguous() && block.scalar_type() == at::kInt,
                    "scripts: the block must be a contiguous int32 tensor on the CPU");
  return {pointer<int32_t>(block), static_cast<size_t>(block.numel())};
}

// The block of a schedule with the scripts of a program behind it.
at::Tensor scripted(const Schedule& schedule, const torch::jit::Object& program, int32_t most_blocks, bool training,
                    bool pin) {
  const ProgramPointer of = program_of(program);
  const py::gil_scoped_release released;
  const auto block = schedule.block();
  const std::vector<Pass> passes =
      training ? std::vector<Pass>{Pass::kTraining} : std::vector<Pass>{Pass::kForward, Pass::kBackward};
  const std::vector<int32_t> scripts = scripts_block(of->program, block, most_blocks, passes);
  const size_t begin = scripts_begin(block);
  at::Tensor tensor = at::empty({static_cast<int64_t>(begin + scripts.size())},
                                at::TensorOptions().dtype(at::kInt).device(at::kCPU).pinned_memory(pin));
  auto* to = static_cast<int32_t*>(tensor.mutable_data_ptr());
  std::memcpy(to, block.data(), block.size_bytes());
  std::fill(to + block.size(), to + begin, 0);
  std::memcpy(to + begin, scripts.data(), scripts.size() * sizeof(int32_t));
  return tensor;
}

std::string script_text_of(const torch::jit::Object& program, const at::Tensor& block) {
  const Scripts scripts = scripts_in(numbers_of(block));
  const ProgramPointer p = program_of(program);
  std::string found;
  for (int pass = 0; pass < kPasses; ++pass) {
    if (scripts.of[pass].empty()) continue;
    const Partition& part = partition_of(p->program, static_cast<Pass>(pass), scripts.most_blocks);
    for (int32_t group = 0; group < scripts.groups; ++group) {
      if (scripts.groups > 1) found += "group " + std::to_string(group) + "\n";
      found += script_text(part, scripts.of_group(pass, group));
    }
  }
  return found;
}

std::string script_fault_of(const torch::jit::Object& program, const at::Tensor& block) {
  const auto numbers = numbers_of(block);
  const Scripts scripts = scripts_in(numbers);
  if (scripts.most_blocks == 0) return "there is no script";
  const ProgramPointer p = program_of(program);
  for (int pass = 0; pass < kPasses; ++pass) {
    if (scripts.of[pass].empty()) continue;
    const Partition& part = partition_of(p->program, static_cast<Pass>(pass), scripts.most_blocks);
    for (int32_t group = 0; group < scripts.groups; ++group) {
      std::string why = script_fault(p->program, part, Schedule::tasks(numbers), group, scripts.of_group(pass, group),
                                     scripts.published[pass], has_gaps(numbers));
      if (!why.empty()) return why;
    }
  }
  return {};
}

// Instructions, and those that wait for other blocks: for a signal, or for the values that a product reads.
std::tuple<int64_t, int64_t> script_counts(const torch::jit::Object& program, const at::Tensor& block) {
  const Scripts scripts = scripts_in(numbers_of(block));
  const ProgramPointer p = program_of(program);
  int64_t instructions = 0, waits = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    if (scripts.of[pass].empty()) continue;
    const Partition& part = partition_of(p->program, static_cast<Pass>(pass), scripts.most_blocks);
    for (int32_t group = 0; group < scripts.groups; ++group) {
      for (const ScriptInstruction& i : scripts.of_group(pass, group)) {
        ++instructions;
        const bool product = (i.op == ScriptInstruction::kRun || i.op == ScriptInstruction::kPair) &&
                             part.steps[i.step]->kind == Step::Kind::kProduct;
        waits += i.op == ScriptInstruction::kWait ||
                 (product && scripts.published[pass] && part.published[part.steps[i.step]->source]);
      }
    }
  }
  return {instructions, waits};
}

// Where the instructions of a pass are in the block.
int64_t script_offset(const at::Tensor& block, int64_t pass) {
  const auto numbers = numbers_of(block);
  const Scripts scripts = scripts_in(numbers);
  return reinterpret_cast<const int32_t*>(scripts.of.at(pass).data()) - numbers.data();
}

// Groups, and how many instructions apart theirs are.
std::tuple<int32_t, int32_t> script_groups(const at::Tensor& block, int64_t pass) {
  const Scripts scripts = scripts_in(numbers_of(block));
  return {scripts.groups, scripts.apart(static_cast<size_t>(pass))};
}

// Buffers whose values products wait for: each is missing when the kernel begins.
std::vector<int32_t> script_published(const torch::jit::Object& program, const at::Tensor& block, int64_t pass) {
  const Scripts scripts = scripts_in(numbers_of(block));
  const ProgramPointer p = program_of(program);
  std::vector<int32_t> found;
  if (!scripts.published.at(pass)) return found;
  const auto& published = partition_of(p->program, static_cast<Pass>(pass), scripts.most_blocks).published;
  for (size_t b = 0; b < published.size(); ++b) {
    if (published[b]) found.push_back(static_cast<int32_t>(b));
  }
  return found;
}

constexpr int64_t kNoLimit = int64_t{1} << 40;  // of shared memory

// Blocks of a pass; of each product the number of its matrix, the bytes that a block keeps of it, and those of it that
// a group reads.
std::tuple<int32_t, std::vector<std::tuple<int32_t, int64_t, int64_t>>> partition_shown(
    const torch::jit::Object& program, int64_t pass, int32_t most_blocks) {
  const ProgramPointer p = program_of(program);
  const Partition& part = partition_of(p->program, static_cast<Pass>(pass), most_blocks);
  std::vector<std::tuple<int32_t, int64_t, int64_t>> found;
  for (const Kept& k : kept_by_a_block(p->program, part)) {
    found.emplace_back(k.matrix, k.kept, k.read);
  }
  return {part.blocks, found};
}

// What calls of a program are expected to take; the program lives as long.
struct ExpectedOfProgram {
  ProgramPointer program;
  Expected expected;
};

ExpectedOfProgram expected_of(const torch::jit::Object& object,
                              const std::vector<std::tuple<int32_t, std::array<double, 4>>>& geometries, double level,
                              double gain, const BatchedAmounts& batched, std::array<double, 3> host) {
  TORCH_CHECK_VALUE(!geometries.empty(), "Expected: there is no geometry");
  ProgramPointer program = program_of(object);
  std::vector<GroupCosts> costs;
  for (const auto& [groups, us] : geometries) costs.push_back({groups, us[0], us[1], us[2], us[3]});
  Expected expected(program->program, std::move(costs), level, gain, batched, {host[0], host[1], host[2]});
  return {std::move(program), std::move(expected)};
}

// Whether the current stream of a device captures a CUDA graph.
bool captures([[maybe_unused]] int device) {
#ifdef WEFT_WITH_CUDA
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));  // whose default stream it may be
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  cuda_check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
#else
  return false;
#endif
}

LossForm loss_form(bool cross_entropy, bool head, int32_t classes) {
  return {cross_entropy, head, classes};
}

std::tuple<std::vector<std::string>, int64_t, int32_t> persistent_source_of(
    const torch::jit::Object& program, int64_t pass, int32_t most_blocks, bool tf32, int32_t matrices, int32_t vectors,
    bool cross_entropy, bool head, int32_t classes, int64_t shared_limit, bool warpgroups) {
  const ProgramPointer p = program_of(program);
  const Partition& part = partition_of(p->program, static_cast<Pass>(pass), most_blocks);
  PersistentSource source = persistent_source(p->program, part, tf32, shared_limit, matrices, vectors,
                                              loss_form(cross_entropy, head, classes), warpgroups);
  return {std::move(source.defines), source.shared_bytes, part.blocks};
}

}  // namespace

void bind_persistent(py::module_& vertex) {
  py::class_<ExpectedOfProgram>(vertex, "Expected", "What calls of a program are expected to take, in microseconds.")
      .def(py::init(torch::wrap_pybind_function(&expected_of)), py::arg("program"), py::arg("geometries"),
           py::arg("level"), py::arg("gain"), py::arg("batched"), py::arg("host"))
      .def("geometry", [](const ExpectedOfProgram& e, const Graphs& graphs) { return e.expected.geometry(graphs); })
      .def("persistent", [](const ExpectedOfProgram& e, const Graphs& graphs, size_t geometry, bool trains,
                            bool captured) { return e.expected.persistent_us(graphs, geometry, trains, captured); })
      .def("batched", [](const ExpectedOfProgram& e, const Graphs& graphs, bool trains, bool captured) {
        return e.expected.batched_us(graphs, trains, captured);
      });
  vertex.def(
      "batched_amounts",
      torch::wrap_pybind_function([](const torch::jit::Object& program, const Graphs& graphs, bool trains) {
        return batched_amounts(program_of(program)->program, graphs.level_sizes(), trains);
      }),
      py::arg("program"), py::arg("graphs"), py::arg("trains"),
      "Of the batched executor's frontiers: passes, meetings of all blocks, giga-multiply-adds beside them, launches, "
      "giga-multiply-adds of products that are launched, megabytes of weights.");
  vertex.def(
      "group_amounts",
      [](const Graphs& graphs, int32_t groups) {
        const GroupAmounts found = group_amounts(graphs, groups);
        return std::pair(found.few, found.eights);
      },
      py::arg("graphs"), py::arg("groups"),
      "How often a group of a persistent kernel pays for a few rows of a frontier, and for 8.");
  vertex.def("captures", torch::wrap_pybind_function(&captures), py::arg("device"),
             "Whether the current stream of a device captures a CUDA graph.");
  vertex.def(
      "scripted", torch::wrap_pybind_function(&scripted), py::arg("schedule"), py::arg("program"),
      py::arg("most_blocks"), py::arg("training"), py::arg("pin"),
      "The block of a schedule with the scripts of a program behind it, for groups of at most so many blocks: of "
      "both passes, or of a training step.");
  vertex.def("script_text", torch::wrap_pybind_function(&script_text_of), py::arg("program"), py::arg("block"),
             "The instructions of the scripts, one line each.");
  vertex.def("script_fault", torch::wrap_pybind_function(&script_fault_of), py::arg("program"), py::arg("block"),
             "What is wrong with the scripts; nothing where nothing is.");
  vertex.def("script_counts", torch::wrap_pybind_function(&script_counts), py::arg("program"), py::arg("block"),
             "Instructions and waits.");
  vertex.def("script_offset", torch::wrap_pybind_function(&script_offset), py::arg("block"), py::arg("pass_"),
             "Where the instructions of a pass are.");
  vertex.def("script_groups", torch::wrap_pybind_function(&script_groups), py::arg("block"), py::arg("pass_"),
             "Groups of a pass, and how many instructions apart theirs are.");
  vertex.def("script_published", torch::wrap_pybind_function(&script_published), py::arg("program"), py::arg("block"),
             py::arg("pass_"), "Buffers whose values products wait for, filled with ones bits beforehand.");
  vertex.def(
      "partition", torch::wrap_pybind_function(&partition_shown), py::arg("program"), py::arg("pass_"),
      py::arg("most_blocks"),
      "Blocks of a pass; of each product the number of its matrix, the bytes that a block keeps of it, and those of it "
      "that a group reads.");
  vertex.def("persistent_source", torch::wrap_pybind_function(&persistent_source_of), py::arg("program"),
             py::arg("pass_"), py::arg("most_blocks"), py::arg("tf32"), py::arg("matrices"), py::arg("vectors") = 0,
             py::arg("cross_entropy") = true, py::arg("head") = false, py::arg("classes") = 0,
             py::arg("shared_limit") = kNoLimit, py::arg("warpgroups") = false,
             "What the persistent kernel of a pass is compiled with, its shared memory and its blocks.");
  vertex.def("persistent_obstacle",
             torch::wrap_pybind_function(
                 [](const torch::jit::Object& program, int32_t most_blocks, int64_t shared_limit, int32_t matrices) {
                   return persistent_obstacle(program_of(program)->program, most_blocks, shared_limit, matrices);
                 }),
             py::arg("program"), py::arg("most_blocks"), py::arg("shared_limit"), py::arg("matrices"),
             "Why the program does not run in persistent kernels; nothing where it does.");
  vertex.def("training_obstacle",
             torch::wrap_pybind_function([](const torch::jit::Object& program, int32_t most_blocks,
                                            int64_t shared_limit, int32_t matrices, int32_t vectors, bool cross_entropy,
                                            bool head, int32_t classes) {
               return training_obstacle(program_of(program)->program, most_blocks, shared_limit, matrices, vectors,
                                        loss_form(cross_entropy, head, classes));
             }),
             py::arg("program"), py::arg("most_blocks"), py::arg("shared_limit"), py::arg("matrices"),
             py::arg("vectors"), py::arg("cross_entropy"), py::arg("head"), py::arg("classes"),
             "The same of a training step.");
}

}  // namespace weft::vertex
