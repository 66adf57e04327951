// vertex_frontiers on the CPU: kernels are interpreted, rows in parallel.
#include "vertex/frontiers.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/library.h>

#include <string>

#include "vertex/cpu/kernel.h"

namespace weft::vertex {
namespace {

const cpu::VertexTables& tables() {
#ifdef __x86_64__
  static const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return cpu::vertex_avx512();
  if (capability == "AVX2") return cpu::vertex_avx2();
#endif
  return cpu::vertex_baseline();
}

static_assert(sizeof(cpu::VertexInstruction) == sizeof(Instruction));

void run_kernel(const Step& step, const Frontier& frontier, int64_t first, int64_t count) {
  const Program& program = frontier.program;
  std::vector<cpu::VertexBuffer> buffers;
  for (const Place& place : frontier.places) buffers.push_back({place.data, place.stride, place.rows, place.edges});
  std::vector<std::vector<cpu::VertexUse>> uses;
  std::vector<const cpu::VertexUse*> table_pointers;
  std::vector<int32_t> table_sizes;
  for (const auto& table : program.tables) {
    auto& copy = uses.emplace_back();
    for (const Use& use : table) copy.push_back({use.column, use.buffer, use.first, use.by_parent});
    table_sizes.push_back(static_cast<int32_t>(copy.size()));
  }
  for (const auto& table : uses) table_pointers.push_back(table.data());
  const Arrays& a = frontier.arrays;
  const cpu::VertexKernel kernel{reinterpret_cast<const cpu::VertexInstruction*>(step.code.data()),
                                 static_cast<int64_t>(step.code.size()),
                                 step.width,
                                 step.registers,
                                 step.edges,
                                 buffers.data(),
                                 program.state,
                                 frontier.constants.data(),
                                 table_pointers.data(),
                                 table_sizes.data(),
                                 a.gather,
                                 a.first_edge,
                                 a.edge_children,
                                 a.edge_parents,
                                 a.first_use,
                                 a.use_rows,
                                 a.use_columns,
                                 a.first_sum_use,
                                 a.sum_use_edges,
                                 a.num_vertices};
  const bool single = frontier.dtype == at::kFloat;
  const auto run = single ? tables().run_float : tables().run_double;
  const int64_t block = (cpu::kVertexBlock + 64) * (single ? 4 : 8);
  const int64_t bytes = (step.registers + 1) * block + step.registers * static_cast<int64_t>(sizeof(void*)) + 64;
  // A block of a row takes about as long as its instructions times its vectors.
  const int64_t work = std::max<int64_t>(1, step.width * static_cast<int64_t>(step.code.size()));
  at::parallel_for(first, first + count, std::max<int64_t>(1, (int64_t{1} << 17) / work),
                   [&](int64_t begin, int64_t end) {
                     thread_local std::vector<char> memory;
                     if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(bytes);
                     const auto address = reinterpret_cast<uintptr_t>(memory.data());
                     run(kernel, begin, end, reinterpret_cast<void*>((address + 63) / 64 * 64));
                   });
}

std::vector<at::Tensor> forward(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                const at::Tensor& schedule, const at::Tensor& host_schedule, const at::Tensor& program,
                                const at::Tensor& constants, at::ScalarType dtype) {
  return run_forward(inputs, matrices, vectors, schedule, host_schedule, program, constants, dtype, run_kernel);
}

std::vector<at::Tensor> backward(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                 at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                 const at::Tensor& host_schedule, const at::Tensor& program,
                                 const at::Tensor& constants, at::ScalarType dtype) {
  return run_backward(grads, inputs, matrices, vectors, saved, schedule, host_schedule, program, constants, dtype,
                      run_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("vertex_frontiers", forward);
  m.impl("vertex_frontiers_backward", backward);
}

}  // namespace weft::vertex
