// vertex_frontiers on the CPU: kernels are interpreted, rows in parallel; products are ATen's.
#include "vertex/exec/vertex_frontiers.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "vertex/exec/aten_executor.h"
#include "vertex/exec/cpu/kernel.h"
#include "vertex/program/object.h"

namespace weft::vertex {
namespace {

class CpuExecutor final : public AtenExecutor {
 public:
  CpuExecutor() : AtenExecutor(at::kCPU) {}

  void fill(void* first, int byte, size_t count) override { std::memset(first, byte, count); }

  void begin(const Memory& memory) override {
    AtenExecutor::begin(memory);
    const Program& program = memory.program;
    single_ = !program.doubles;
    for (size_t i = 0; i < memory.buffers.size(); ++i) {
      const Place& place = memory.buffers[i];
      buffers_.push_back({place.data, place.stride, place.rows, place.edges, program.buffers[i].dtype});
    }
    const Arrays& a = memory.arrays;
    kernel_.buffers = buffers_.data();
    kernel_.constants = memory.program.constants.data();
    kernel_.tables = memory.program.tables.data();
    kernel_.gather = a.gather;
    kernel_.first_edge = a.first_edge;
    kernel_.edge_children = a.edge_children;
    kernel_.edge_parents = a.edge_parents;
    kernel_.first_use = a.first_use;
    kernel_.users = a.users;
    kernel_.first_sum_use = a.first_sum_use;
    kernel_.sum_use_edges = a.sum_use_edges;
    kernel_.num_vertices = a.num_vertices;
  }

 protected:
  void kernel(const Step& step, int64_t first, int64_t count, bool leaves) override {
    cpu::VertexKernel k = kernel_;
    const std::vector<Instruction>& code = leaves ? step.leaf_code : step.code;
    k.code = code.data();
    k.length = static_cast<int64_t>(code.size());
    k.width = step.width;
    k.registers = step.registers;
    k.edges = step.edges;
    const auto run = single_ ? cpu::vertex_kernels().run_float : cpu::vertex_kernels().run_double;
    const int64_t bytes = cpu::vertex_scratch(step.registers, single_ ? 4 : 8);
    // What a row costs: its instructions times its columns. A thread is worth its start for some ten microseconds.
    const int64_t work = std::max<int64_t>(1, k.width * k.length);
    const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 17) / work);
    at::parallel_for(first, first + count, grain, [&](int64_t begin, int64_t end) {
      thread_local std::vector<char> memory;
      if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(bytes + 64);
      const auto address = reinterpret_cast<uintptr_t>(memory.data());
      run(k, begin, end, reinterpret_cast<void*>((address + 63) / 64 * 64));
    });
  }

 private:
  bool single_ = true;
  cpu::VertexKernel kernel_{};
  std::vector<cpu::VertexBuffer> buffers_;
};

std::vector<at::Tensor> forward_cpu(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                    const at::Tensor& schedule, const at::Tensor& host_schedule,
                                    const ProgramPointer& program, int64_t num_vertices, int64_t num_inner,
                                    int64_t num_edges) {
  CpuExecutor executor;
  return run_forward({inputs, matrices, vectors, schedule, host_schedule, program->program},
                     {num_vertices, num_inner, num_edges}, executor);
}

std::vector<at::Tensor> backward_cpu(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                     at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                     const at::Tensor& host_schedule, const ProgramPointer& program,
                                     at::IntArrayRef of_inputs, at::IntArrayRef of_matrices, at::IntArrayRef of_vectors,
                                     bool overlap) {
  CpuExecutor executor;
  return run_backward(grads, {inputs, matrices, vectors, schedule, host_schedule, program->program}, saved, of_inputs,
                      of_matrices, of_vectors, overlap, executor);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("vertex_frontiers", forward_cpu);
  m.impl("vertex_frontiers_backward", backward_cpu);
}

}  // namespace weft::vertex
