// Checks, allocation and the loop over tasks; kernels are the device's.
#include "vertex/exec/vertex_frontiers.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <set>

#include "common/check.h"
#include "common/tensor.h"

namespace weft::vertex {
namespace {

constexpr const char* kOp = "vertex_frontiers";

at::ScalarType type_of(const Buffer& b) {
  constexpr at::ScalarType kTypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  return kTypes[static_cast<int>(b.dtype)];
}

std::span<const int32_t> checked(const at::Tensor& schedule, const at::Tensor& host_schedule) {
  TORCH_CHECK_TYPE(host_schedule.scalar_type() == at::kInt && host_schedule.is_cpu(), kOp,
                   ": host_schedule must be an int32 tensor on the CPU");
  TORCH_CHECK_TYPE(schedule.scalar_type() == at::kInt, kOp, ": schedule must be an int32 tensor");
  TORCH_CHECK_VALUE(schedule.numel() == host_schedule.numel(), kOp, ": the two schedules differ in length");
  const std::span<const int32_t> numbers(pointer<int32_t>(host_schedule), host_schedule.numel());
  TORCH_CHECK_VALUE(numbers.size() > Schedule::kHeader + size_t{Schedule::kNumArrays}, kOp,
                    ": the schedule is damaged");
  return numbers;
}

struct Run {
  explicit Run(const Operands& operands)
      : program(operands.program),
        schedule(operands.schedule.contiguous()),
        host_schedule(operands.host_schedule.contiguous()),
        numbers(checked(schedule, host_schedule)),
        num_vertices(numbers[Schedule::kVertices]),
        num_edges(numbers[Schedule::kEdges]),
        device(schedule.device()),
        matrices(operands.matrices.begin(), operands.matrices.end()) {
    const int32_t* block = pointer<int32_t>(schedule);
    const auto array = [&](Schedule::Array which) {
      const int32_t* const where = numbers.data() + Schedule::kHeader + which;
      return where[0] < where[1] ? block + where[0] : nullptr;
    };
    arrays = {array(Schedule::kVertexOf),
              array(Schedule::kGather),
              array(Schedule::kFirstEdge),
              array(Schedule::kEdgeChild),
              array(Schedule::kEdgeParent),
              array(Schedule::kFirstUse),
              array(Schedule::kUsers),
              array(Schedule::kFirstSumUse),
              array(Schedule::kSumUseEdge),
              array(Schedule::kTaskTable),
              num_vertices};
    TORCH_CHECK_VALUE(program.gathered <= numbers[Schedule::kColumns], kOp, ": the program gathers by ",
                      program.gathered, " columns, the schedule has ", numbers[Schedule::kColumns]);
    for (const MatrixGradient& g : program.matrix_gradients) {
      TORCH_CHECK_VALUE(size_t(g.matrix) < matrices.size(), kOp, ": there is no matrix ", g.matrix);
    }
    for (const VectorGradient& g : program.vector_gradients) {
      TORCH_CHECK_VALUE(size_t(g.vector) < operands.vectors.size(), kOp, ": there is no vector ", g.vector);
    }
    tasks = Schedule::tasks(numbers);
    for (const Task& task : tasks) {
      leaves += task.level == 0 ? task.count : 0;
      TORCH_CHECK_VALUE(task.kind < program.functions, kOp, ": the schedule has tasks of function ", task.kind,
                        ", the program ", program.functions, " functions");
    }
    for (const auto* list : {&program.forward, &program.backward}) {
      for (const Step& s : *list) {
        if (s.product) check_matrix(s);
      }
    }
    tensors.resize(program.buffers.size());
    places.resize(tensors.size());
  }

  void check_matrix(const Step& s) {
    TORCH_CHECK_VALUE(s.matrix < static_cast<int64_t>(matrices.size()), kOp, ": the program reads matrix ", s.matrix,
                      ", got ", matrices.size());
    at::Tensor& m = matrices[s.matrix];
    const auto &source = program.buffers[s.source], &target = program.buffers[s.target];
    const std::array<int64_t, 2> shape = {s.transposed ? target.width : source.width,
                                          s.transposed ? source.width : target.width};
    TORCH_CHECK_VALUE(m.sizes() == at::IntArrayRef(shape), kOp, ": matrix ", s.matrix, " must be ",
                      at::IntArrayRef(shape), ", got ", m.sizes());
    m = cast(m, source, "matrix", s.matrix);
  }

  at::Tensor cast(const at::Tensor& t, const Buffer& b, const char* name, int64_t index) const {
    TORCH_CHECK(t.device() == device, kOp, ": ", name, " ", index, " must be on ", device, ", got ", t.device());
    TORCH_CHECK_TYPE(t.is_floating_point(), kOp, ": ", name, " ", index, " must be ", type_of(b), ", got ",
                     t.scalar_type());
    return t.to(type_of(b));
  }

  int64_t rows(const Buffer& b) const {
    switch (b.space) {
      case Space::kInner:
        return num_vertices - leaves;
      case Space::kEdges:
        return num_edges;
      case Space::kVector:
        return 1;
      default:
        return num_vertices;
    }
  }
  // The row (of all vertices) that the buffer begins with.
  int64_t first_row(int64_t buffer) const { return program.buffers[buffer].space == Space::kInner ? leaves : 0; }

  void put(size_t i, at::Tensor tensor) {
    const Buffer& b = program.buffers[i];
    const bool callers = b.space >= Space::kInput && b.space != Space::kVector;
    const int64_t stride = b.space == Space::kVector ? 0 : tensor.stride(0);
    // Kernels count rows from the first vertex.
    const int64_t before = first_row(static_cast<int64_t>(i)) * stride * static_cast<int64_t>(tensor.element_size());
    void* data = tensor.numel() > 0 ? static_cast<char*>(tensor.data_ptr()) - before : nullptr;
    places[i] = {data, stride, callers ? arrays.vertices : nullptr, b.space == Space::kEdges};
    tensors[i] = std::move(tensor);
  }

  // A caller's tensor: rows of `width` neighbouring columns.
  at::Tensor given(at::TensorList list, const Buffer& b, const char* name) const {
    TORCH_CHECK_VALUE(b.index < static_cast<int64_t>(list.size()), kOp, ": the program reads ", name, " ", b.index,
                      ", got ", list.size());
    at::Tensor t = cast(list[b.index], b, name, b.index);
    TORCH_CHECK_VALUE(t.numel() == rows(b) * b.width && (b.space == Space::kVector || t.dim() == 2), kOp, ": ", name,
                      " ", b.index, " must have ", rows(b), " rows of ", b.width, ", got ", t.sizes());
    if (b.space == Space::kVector) return t.reshape({1, b.width}).contiguous();
    return t.stride(1) == 1 || b.width == 1 || t.numel() == 0 ? t : t.contiguous();
  }

  at::TensorOptions options(const Buffer& b) const { return at::TensorOptions().dtype(type_of(b)).device(device); }

  // A buffer that the executor makes. Rows that only other functions write, and slots without a child, are read as
  // zeros.
  at::Tensor make(const Buffer& b) const {
    const int64_t slots = int64_t{numbers[Schedule::kColumns]} * (num_vertices - leaves);
    const bool full = b.space == Space::kEdges || (b.space == Space::kInner && numbers[Schedule::kUses] == slots);
    const bool zeros = program.functions > 1 || (b.scattered && !full);
    return zeros ? at::zeros({rows(b), b.width}, options(b)) : at::empty({rows(b), b.width}, options(b));
  }

  Frontier frontier() const { return {places, program, arrays, matrices}; }

  // The number of the first of the last tasks that are small: in one kernel they cost less than their launches and than
  // products that do not fill the device.
  size_t tail() const {
    constexpr int64_t kMultiplyAdds = int64_t{1} << 28;
    int64_t most = program.doubles ? 32 : 1024, weights = 0;
    for (const auto* list : {&program.forward, &program.backward}) {
      for (const Step& s : *list) {
        if (!s.product) continue;
        weights = std::max<int64_t>(weights, matrices[s.matrix].numel());
        if (program.buffers[s.source].width % 4 != 0 || program.buffers[s.target].width % 4 != 0) most = 32;
      }
    }
    size_t first = tasks.size();
    for (; first > 0; --first) {
      const Task& task = tasks[first - 1];
      const int64_t rows = std::max(task.count, task.num_edges);
      if (task.level == 0 || rows > most || rows * weights > kMultiplyAdds) break;
    }
    return first + 2 < tasks.size() ? first : tasks.size();
  }

  void steps(const std::vector<Step>& list, const Task& task, Executor& executor) const {
    for (const Step& s : list) {
      if (s.function != task.kind || s.late) continue;
      const int64_t first = s.edges ? task.first_edge : task.first, count = s.edges ? task.num_edges : task.count;
      if (count == 0) continue;
      if (!s.product) {
        executor.kernel(s, first, count, task.level == 0);
      } else if (!s.skips_leaves || task.level > 0) {
        executor.product(s.transposed, tensors[s.source], first - first_row(s.source), matrices[s.matrix],
                         tensors[s.target], first - first_row(s.target), count);
      } else if (s.zeroes_leaves) {
        tensors[s.target].narrow(0, first - first_row(s.target), count).zero_();
      }
    }
  }

  // What was put off until all tasks are done. The rows of one function are together, and those without children first.
  void late_steps(const std::vector<Step>& list, Executor& executor) const {
    for (const Step& s : list) {
      if (!s.late) continue;
      if (program.functions > 1) {
        for (const Task& task : tasks) {
          if (s.function == task.kind) executor.kernel(s, task.first, task.count, task.level == 0);
        }
        continue;
      }
      if (leaves > 0) executor.kernel(s, 0, leaves, true);
      if (leaves < num_vertices) executor.kernel(s, leaves, num_vertices - leaves, false);
    }
  }

  const Program& program;
  at::Tensor schedule, host_schedule;
  std::span<const int32_t> numbers;
  int64_t num_vertices, num_edges;
  at::Device device;
  std::vector<at::Tensor> matrices;
  Arrays arrays;
  std::span<const Task> tasks;
  int64_t leaves = 0;  // vertices without children: the first rows
  std::vector<at::Tensor> tensors;
  std::vector<Place> places;
};

// The gradients of matrices: sums over rows, from the last row to the first, as these are done. In float16 and bfloat16
// they are not cut, so that they are rounded once.
class MatrixGradients {
 public:
  MatrixGradients(const Run& run, Executor& executor)
      : run_(run), executor_(executor), rows_(run.num_vertices), edges_(run.num_edges) {
    for (const MatrixGradient& g : run.program.matrix_gradients) {
      const at::Tensor& matrix = run.matrices[g.matrix];
      at::Tensor& total = found[g.matrix];
      if (!total.defined()) total = at::empty(matrix.sizes(), matrix.options());
      cut_ = cut_ && (matrix.scalar_type() == at::kFloat || matrix.scalar_type() == at::kDouble);
    }
    cut_ = cut_ && run.program.functions == 1;
  }

  // Rows from this task on are done.
  void advance(const Task& task) {
    if (cut_ && std::max(rows_ - task.first, edges_ - task.first_edge) >= kRows) {
      take(std::max<int64_t>(task.first, run_.leaves), task.first_edge);
    }
  }
  void finish() {
    take(0, 0);
    for (auto& [number, total] : found) {
      if (!started_.contains(number)) total.zero_();
    }
  }

  std::map<int32_t, at::Tensor> found;

 private:
  // Worth a product of their own.
  static constexpr int64_t kRows = 1024;

  void take(int64_t row, int64_t edge) {
    aside_ = aside_ || std::max(rows_ - row, edges_ - edge) >= kRows;
    if (!found.empty() && !aside_) {
      add(row, edge);  // all there is, too little to wait for another stream
    } else if (!found.empty()) {
      executor_.aside([&] { add(row, edge); });
    }
    rows_ = row;
    edges_ = edge;
  }
  void add(int64_t row, int64_t edge) {
    for (const MatrixGradient& g : run_.program.matrix_gradients) {
      const int64_t first = g.edges ? edge : g.skips_leaves ? std::max(row, run_.leaves) : row;
      const int64_t end = g.edges ? edges_ : rows_;
      if (first >= end) continue;
      const auto rows = [&](int32_t buffer) {
        return run_.tensors[buffer].narrow(0, first - run_.first_row(buffer), end - first);
      };
      at::Tensor& total = found.at(g.matrix);
      if (started_.insert(g.matrix).second) {
        at::mm_out(total, rows(g.source).t(), rows(g.gradient));
      } else {
        at::addmm_out(total, total, rows(g.source).t(), rows(g.gradient));
      }
    }
  }

  const Run& run_;
  Executor& executor_;
  int64_t rows_, edges_;  // from here on all are in the sums
  bool cut_ = true, aside_ = false;
  std::set<int32_t> started_;
};

// That the numbers of `found` are those that the caller expects.
void check_numbers(const std::map<int32_t, at::Tensor>& found, at::IntArrayRef expected, const char* name) {
  const bool same = std::equal(found.begin(), found.end(), expected.begin(), expected.end(),
                               [](const auto& pair, int64_t number) { return pair.first == number; });
  TORCH_CHECK_VALUE(same, kOp, "_backward: the program computes gradients of other ", name, " than ", expected);
}

}  // namespace

std::vector<at::Tensor> run_forward(const Operands& operands, std::array<int64_t, 3> sizes, Executor& executor) {
  Run r(operands);
  const std::array<int64_t, 3> planned = {r.num_vertices, r.num_vertices - r.leaves, r.num_edges};
  TORCH_CHECK_VALUE(sizes == planned, kOp, ": the schedule has ", at::IntArrayRef(planned),
                    " vertices, vertices with children and edges, expected ", at::IntArrayRef(sizes));
  const auto& buffers = r.program.buffers;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.backward || b.space == Space::kOutputGrad) continue;
    if (b.space == Space::kInput) {
      r.put(i, r.given(operands.inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(operands.vectors, b, "vector"));
    } else {
      r.put(i, r.make(b));
    }
  }
  std::vector<at::Tensor> made;
  for (const int32_t i : r.program.results()) made.push_back(r.tensors[i]);
  executor.begin(r.frontier());
  const size_t tail = r.tail();
  for (const Task& task : r.tasks.first(tail)) r.steps(r.program.forward, task, executor);
  if (tail < r.tasks.size() && !executor.tail(r.program.forward, r.tasks, tail, /*backward=*/false)) {
    for (const Task& task : r.tasks.subspan(tail)) r.steps(r.program.forward, task, executor);
  }
  r.late_steps(r.program.forward, executor);
  return made;
}

std::vector<at::Tensor> run_backward(at::TensorList grads, const Operands& operands, at::TensorList saved,
                                     at::IntArrayRef of_inputs, at::IntArrayRef of_matrices, at::IntArrayRef of_vectors,
                                     bool overlap, Executor& executor) {
  Run r(operands);
  std::map<int32_t, at::Tensor> input_grads, vector_grads;
  const auto& buffers = r.program.buffers;
  size_t next = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.saved) {
      TORCH_CHECK_VALUE(next < saved.size(), kOp, "_backward: the program saves more than ", saved.size(), " tensors");
      const at::Tensor& t = saved[next++];
      TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) == r.rows(b) && t.size(1) == b.width && t.device() == r.device, kOp,
                        "_backward: saved tensor ", next - 1, " is not what the forward pass saved");
      r.put(i, t.to(type_of(b)).contiguous());
    } else if (b.space == Space::kInput) {
      r.put(i, r.given(operands.inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(operands.vectors, b, "vector"));
    } else if (b.space == Space::kOutputGrad) {
      r.put(i, r.given(grads, b, "gradient"));
    } else if (b.space == Space::kInputGrad) {
      // Columns that nothing depends on are written by nobody.
      const std::array<int64_t, 2> shape = {r.rows(b), b.width};
      input_grads[b.index] = b.written ? at::empty(shape, r.options(b)) : at::zeros(shape, r.options(b));
      r.put(i, input_grads[b.index]);
    } else if (b.backward) {
      r.put(i, r.make(b));
    }
  }
  executor.begin(r.frontier());
  MatrixGradients matrices(r, executor);
  size_t end = r.tasks.size();
  if (const size_t tail = r.tail(); tail < end && executor.tail(r.program.backward, r.tasks, tail, /*backward=*/true)) {
    end = tail;
  }
  for (size_t i = end; i-- > 0;) {
    r.steps(r.program.backward, r.tasks[i], executor);
    if (overlap && i > 0) matrices.advance(r.tasks[i]);
  }
  matrices.finish();
  r.late_steps(r.program.backward, executor);

  const at::ScalarType registers = r.program.doubles ? at::kDouble : at::kFloat;
  for (const VectorGradient& g : r.program.vector_gradients) {
    at::Tensor& total = vector_grads[g.vector];
    if (!total.defined()) {
      total = at::zeros({operands.vectors[g.vector].numel()}, at::TensorOptions().dtype(registers).device(r.device));
    }
    total.narrow(0, g.first, g.width)
        .add_(at::sum(r.tensors[g.buffer].narrow(1, g.column, g.width), 0, /*keepdim=*/false, registers));
  }
  executor.join();
  check_numbers(input_grads, of_inputs, "inputs");
  check_numbers(matrices.found, of_matrices, "matrices");
  check_numbers(vector_grads, of_vectors, "vectors");
  std::vector<at::Tensor> results;
  const auto give = [&](const std::map<int32_t, at::Tensor>& found, at::TensorList of) {
    for (const auto& [number, gradient] : found) {
      results.push_back(gradient.to(of[number].scalar_type()).view(of[number].sizes()));
    }
  };
  give(input_grads, operands.inputs);
  give(matrices.found, operands.matrices);
  give(vector_grads, operands.vectors);
  return results;
}

}  // namespace weft::vertex
