// Checks, allocation and the loop over tasks; kernels are the device's.
#include "vertex/vertex_frontiers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>

#include "common/check.h"
#include "common/tensor.h"

namespace weft::vertex {
namespace {

constexpr const char* kOp = "vertex_frontiers";

// Parsed programs of this thread; a call finds its own by comparing a few kilobytes.
std::shared_ptr<const Program> parsed(const at::Tensor& program, const at::Tensor& constants) {
  struct Known {
    std::vector<int64_t> code;
    std::shared_ptr<const Program> program;
  };
  thread_local std::vector<Known> known;
  TORCH_CHECK_TYPE(program.scalar_type() == at::kLong && program.is_cpu() && program.is_contiguous(), kOp,
                   ": program must be a contiguous int64 tensor on the CPU");
  TORCH_CHECK_TYPE(constants.scalar_type() == at::kDouble && constants.is_cpu() && constants.is_contiguous(), kOp,
                   ": constants must be a contiguous float64 tensor on the CPU");
  const std::span<const int64_t> code(pointer<int64_t>(program), program.numel());
  const std::span<const double> numbers(pointer<double>(constants), constants.numel());
  const auto same_bits = [](double a, double b) { return std::bit_cast<int64_t>(a) == std::bit_cast<int64_t>(b); };
  for (const Known& k : known) {
    if (std::equal(code.begin(), code.end(), k.code.begin(), k.code.end()) &&
        std::equal(numbers.begin(), numbers.end(), k.program->constants.begin(), k.program->constants.end(),
                   same_bits)) {
      return k.program;
    }
  }
  std::shared_ptr<const Program> made;
  try {
    made = std::make_shared<const Program>(Program::parse(code, numbers));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  if (known.size() >= 64) known.erase(known.begin());
  known.push_back({{code.begin(), code.end()}, made});
  return made;
}

struct Run {
  Run(at::TensorList matrices, const at::Tensor& schedule, const at::Tensor& host_schedule, const at::Tensor& program,
      const at::Tensor& constants, at::ScalarType dtype_)
      : program(parsed(program, constants)),
        numbers(pointer<int32_t>(host_schedule), host_schedule.numel()),
        options(at::TensorOptions().dtype(dtype_).device(schedule.device())) {
    TORCH_CHECK_TYPE(host_schedule.scalar_type() == at::kInt && host_schedule.is_cpu() && host_schedule.is_contiguous(),
                     kOp, ": host_schedule must be a contiguous int32 tensor on the CPU");
    TORCH_CHECK_TYPE(schedule.scalar_type() == at::kInt && schedule.is_contiguous(), kOp,
                     ": schedule must be a contiguous int32 tensor");
    TORCH_CHECK_VALUE(schedule.numel() == host_schedule.numel(), kOp, ": the two schedules differ in length");
    TORCH_CHECK_VALUE(numbers.size() > Schedule::kHeader + size_t{Schedule::kNumArrays}, kOp,
                      ": the schedule is damaged");
    TORCH_CHECK_TYPE(dtype_ == at::kFloat || dtype_ == at::kDouble, kOp, ": dtype must be float32 or float64, got ",
                     dtype_);
    num_vertices = numbers[Schedule::kVertices];
    num_edges = numbers[Schedule::kEdges];
    const int32_t* block = pointer<int32_t>(schedule);
    const auto array = [&](Schedule::Array which) { return block + numbers[size_t{Schedule::kHeader} + which]; };
    arrays = {array(Schedule::kVertexOf),
              array(Schedule::kGather),
              array(Schedule::kFirstEdge),
              array(Schedule::kEdgeChild),
              array(Schedule::kEdgeParent),
              array(Schedule::kFirstUse),
              array(Schedule::kUseRow),
              array(Schedule::kUseColumn),
              array(Schedule::kFirstSumUse),
              array(Schedule::kSumUseEdge),
              num_vertices};
    tasks = {reinterpret_cast<const Task*>(numbers.data() + numbers[size_t{Schedule::kHeader} + Schedule::kTaskTable]),
             static_cast<size_t>(numbers[Schedule::kTasks])};
    for (const Task& task : tasks) {
      TORCH_CHECK_VALUE(task.kind < this->program->functions, kOp, ": the schedule has tasks of function ", task.kind,
                        ", the program ", this->program->functions, " functions");
    }
    for (const auto* list : {&this->program->forward, &this->program->backward}) {
      for (const Step& s : *list) {
        if (!s.product) continue;
        TORCH_CHECK_VALUE(s.matrix < static_cast<int64_t>(matrices.size()), kOp, ": the program reads matrix ",
                          s.matrix, ", got ", matrices.size());
        const at::Tensor& m = matrices[s.matrix];
        const auto &source = this->program->buffers[s.source], &target = this->program->buffers[s.target];
        const std::array<int64_t, 2> shape = {s.transposed ? target.width : source.width,
                                              s.transposed ? source.width : target.width};
        TORCH_CHECK_VALUE(m.sizes() == at::IntArrayRef(shape), kOp, ": matrix ", s.matrix, " must be ",
                          at::IntArrayRef(shape), ", got ", m.sizes());
        TORCH_CHECK_TYPE(m.scalar_type() == dtype_, kOp, ": matrix ", s.matrix, " must be ", dtype_, ", got ",
                         m.scalar_type());
      }
    }
    tensors.resize(this->program->buffers.size());
    places.resize(tensors.size());
  }

  int64_t rows(const Buffer& b) const {
    return b.space == Space::kEdges ? num_edges : b.space == Space::kVector ? 1 : num_vertices;
  }

  void put(size_t i, at::Tensor tensor) {
    const Buffer& b = program->buffers[i];
    const bool callers = b.space != Space::kRows && b.space != Space::kEdges;
    places[i] = {tensor.numel() > 0 ? tensor.data_ptr() : nullptr, b.space == Space::kVector ? 0 : tensor.stride(0),
                 callers && b.space != Space::kVector ? arrays.vertices : nullptr, b.space == Space::kEdges};
    tensors[i] = std::move(tensor);
  }

  // A caller's tensor: rows of `width` neighbouring columns.
  at::Tensor given(at::TensorList list, const Buffer& b, const char* name) const {
    TORCH_CHECK_VALUE(b.index < static_cast<int64_t>(list.size()), kOp, ": the program reads ", name, " ", b.index,
                      ", got ", list.size());
    at::Tensor t = list[b.index];
    TORCH_CHECK_TYPE(t.scalar_type() == options.dtype().toScalarType(), kOp, ": ", name, " ", b.index, " must be ",
                     options.dtype(), ", got ", t.scalar_type());
    TORCH_CHECK_VALUE(t.numel() == rows(b) * b.width && (b.space == Space::kVector || t.dim() == 2), kOp, ": ", name,
                      " ", b.index, " must have ", rows(b), " rows of ", b.width, ", got ", t.sizes());
    if (b.space == Space::kVector) return t.reshape({1, b.width}).contiguous();
    return t.stride(1) == 1 || b.width == 1 || t.numel() == 0 ? t : t.contiguous();
  }

  // A buffer that the executor makes. The rows that only other functions write are read as zeros.
  at::Tensor make(const Buffer& b) const {
    return program->functions > 1 ? at::zeros({rows(b), b.width}, options) : at::empty({rows(b), b.width}, options);
  }

  Frontier frontier() const { return {places, *program, arrays, options.dtype().toScalarType()}; }

  void steps(const std::vector<Step>& list, const Task& task, at::TensorList matrices, Executor& executor) const {
    for (const Step& s : list) {
      if (s.function != task.kind) continue;
      const int64_t first = s.edges ? task.first_edge : task.first, count = s.edges ? task.num_edges : task.count;
      if (count == 0) continue;
      if (!s.product) {
        executor.kernel(s, first, count);
      } else if (s.skips_leaves && task.level == 0) {
        if (!program->buffers[s.target].backward) tensors[s.target].narrow(0, first, count).zero_();
      } else {
        executor.product(s, tensors[s.source], matrices[s.matrix], tensors[s.target], first, count);
      }
    }
  }

  std::shared_ptr<const Program> program;
  std::span<const int32_t> numbers;
  at::TensorOptions options;
  int64_t num_vertices, num_edges;
  Arrays arrays;
  std::span<const Task> tasks;
  std::vector<at::Tensor> tensors;
  std::vector<Place> places;
};

}  // namespace

std::vector<at::Tensor> run_forward(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                    const at::Tensor& schedule, const at::Tensor& host_schedule,
                                    const at::Tensor& program, const at::Tensor& constants, at::ScalarType dtype,
                                    Executor& executor) {
  Run r(matrices, schedule, host_schedule, program, constants, dtype);
  std::vector<at::Tensor> results;
  const auto& buffers = r.program->buffers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.backward || b.space == Space::kOutputGrad) continue;
    if (b.space == Space::kInput) {
      r.put(i, r.given(inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(vectors, b, "vector"));
    } else {
      r.put(i, r.make(b));
      if (b.space == Space::kOutput) results.push_back(r.tensors[i]);
    }
  }
  executor.begin(r.frontier());
  for (const Task& task : r.tasks) r.steps(r.program->forward, task, matrices, executor);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].saved) results.push_back(r.tensors[i]);
  }
  return results;
}

std::vector<at::Tensor> run_backward(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                     at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                     const at::Tensor& host_schedule, const at::Tensor& program,
                                     const at::Tensor& constants, at::ScalarType dtype, Executor& executor) {
  Run r(matrices, schedule, host_schedule, program, constants, dtype);
  std::map<int32_t, at::Tensor> input_grads, matrix_grads, vector_grads;
  const auto& buffers = r.program->buffers;
  size_t next = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.saved) {
      TORCH_CHECK_VALUE(next < saved.size(), kOp, "_backward: the program saves more than ", saved.size(), " tensors");
      const at::Tensor& t = saved[next++];
      TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) == r.rows(b) && t.size(1) == b.width && t.is_contiguous() &&
                            t.scalar_type() == dtype,
                        kOp, "_backward: saved tensor ", next - 1, " is not what the forward pass saved");
      r.put(i, t);
    } else if (b.space == Space::kInput) {
      r.put(i, r.given(inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(vectors, b, "vector"));
    } else if (b.space == Space::kOutputGrad) {
      r.put(i, r.given(grads, b, "gradient"));
    } else if (b.space == Space::kInputGrad) {
      // Columns that nothing depends on are written by nobody.
      input_grads[b.index] = at::zeros({r.rows(b), b.width}, r.options);
      r.put(i, input_grads[b.index]);
    } else if (b.backward) {
      r.put(i, r.make(b));
    }
  }
  executor.begin(r.frontier());
  for (size_t i = r.tasks.size(); i-- > 0;) r.steps(r.program->backward, r.tasks[i], matrices, executor);

  const int64_t leaves = r.tasks.empty() || r.tasks[0].level != 0 ? 0 : [&] {
    int64_t count = 0;
    for (const Task& task : r.tasks) count += task.level == 0 ? task.count : 0;
    return count;
  }();
  for (const MatrixGradient& g : r.program->matrix_gradients) {
    const int64_t first = g.skips_leaves && !g.edges ? leaves : 0;
    const at::Tensor &source = r.tensors[g.source], &gradient = r.tensors[g.gradient];
    const int64_t count = source.size(0) - first;
    at::Tensor found = at::mm(source.narrow(0, first, count).t(), gradient.narrow(0, first, count));
    auto [at, fresh] = matrix_grads.emplace(g.matrix, found);
    if (!fresh) at->second.add_(found);
  }
  for (const VectorGradient& g : r.program->vector_gradients) {
    at::Tensor& total = vector_grads[g.vector];
    if (!total.defined()) total = at::zeros({vectors[g.vector].numel()}, r.options);
    total.narrow(0, g.first, g.width).add_(at::sum(r.tensors[g.buffer].narrow(1, g.column, g.width), 0));
  }
  std::vector<at::Tensor> results;
  for (const auto* found : {&input_grads, &matrix_grads, &vector_grads}) {
    for (const auto& [number, gradient] : *found) results.push_back(gradient);
  }
  return results;
}

}  // namespace weft::vertex
