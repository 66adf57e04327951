// Checks, allocation and the loop over tasks; kernels are the device's.
#include "vertex/exec/vertex_frontiers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "common/check.h"
#include "common/integers.h"
#include "common/tensor.h"
#include "vertex/exec/aten_executor.h"
#include "vertex/exec/expected.h"
#include "vertex/exec/script.h"

namespace weft::vertex {
namespace {

constexpr const char* kOp = "vertex_frontiers";

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

// One call: its operands checked, its memory found or made.
struct Run {
  Run(const Operands& operands, Pass pass)
      : program(operands.program),
        schedule(operands.schedule.contiguous()),
        host_schedule(operands.host_schedule.contiguous()),
        numbers(checked(schedule, host_schedule)),
        device(schedule.device()),
        matrices(operands.matrices.size()),
        tensors(program.buffers.size()),
        places(tensors.size()),
        matrix_places(matrices.size()),
        matrix_gradients(matrices.size()),
        vector_gradients(operands.vectors.size()) {
    extent = {Schedule::tasks(numbers), numbers[Schedule::kVertices], numbers[Schedule::kEdges], 0};
    const int32_t* block = pointer<int32_t>(schedule);
    const auto array = [&](Schedule::Array which) {
      const int32_t* const where = numbers.data() + Schedule::kHeader + which;
      return where[0] < where[1] ? block + where[0] : nullptr;
    };
    arrays = {array(Schedule::kVertexOf),   array(Schedule::kGather),
              array(Schedule::kFirstEdge),  array(Schedule::kEdgeChild),
              array(Schedule::kEdgeParent), array(Schedule::kFirstUse),
              array(Schedule::kUsers),      array(Schedule::kFirstSumUse),
              array(Schedule::kSumUseEdge), array(Schedule::kTaskTable),
              extent.num_vertices};
    TORCH_CHECK_VALUE(program.gathered <= numbers[Schedule::kColumns], kOp, ": the program gathers by ",
                      program.gathered, " columns, the schedule has ", numbers[Schedule::kColumns]);
    for (const Task& task : extent.tasks) {
      extent.leaves += task.level == 0 ? task.count : 0;
      TORCH_CHECK_VALUE(task.kind < program.functions, kOp, ": the schedule has tasks of function ", task.kind,
                        ", the program ", program.functions, " functions");
    }
    // A training step's sums run over all rows.
    together = functions_together(program, extent) && (pass != Pass::kTraining || program.functions == 1);
    for (const auto* steps : {&program.forward, &program.backward}) {
      if (pass == (steps == &program.forward ? Pass::kBackward : Pass::kForward)) continue;
      for (const Step& s : *steps) {
        if (s.kind == Step::Kind::kProduct) take_matrix(s, operands.matrices);
      }
    }
    scripts = scripts_in(numbers);
    if (scripts.published[static_cast<size_t>(pass)]) {
      published = &partition_of(program, pass, scripts.most_blocks).published;
    }
  }

  void take_matrix(const Step& s, at::TensorList given) {
    TORCH_CHECK_VALUE(s.matrix < static_cast<int64_t>(given.size()), kOp, ": the program reads matrix ", s.matrix,
                      ", got ", given.size());
    if (matrices[s.matrix].defined()) return;
    const auto &source = program.buffers[s.source], &target = program.buffers[s.target];
    const std::array<int64_t, 2> shape = {s.transposed ? target.width : source.width,
                                          s.transposed ? source.width : target.width};
    TORCH_CHECK_VALUE(given[s.matrix].sizes() == at::IntArrayRef(shape), kOp, ": matrix ", s.matrix, " must be ",
                      at::IntArrayRef(shape), ", got ", given[s.matrix].sizes());
    at::Tensor m = cast(given[s.matrix], source, "matrix", s.matrix);
    const bool by_rows = m.stride(1) == 1 && m.stride(0) >= std::max<int64_t>(1, m.size(1));
    const bool by_columns = m.stride(0) == 1 && m.stride(1) >= std::max<int64_t>(1, m.size(0));
    if (!by_rows && !by_columns) m = m.contiguous();
    matrix_places[s.matrix] = place(m, source.dtype);
    matrices[s.matrix] = std::move(m);
  }

  static Matrix place(const at::Tensor& m, DType dtype) {
    void* data = m.numel() > 0 ? const_cast<void*>(m.const_data_ptr()) : nullptr;
    return {data, m.size(0), m.size(1), m.stride(0), m.stride(1), dtype};
  }

  at::Tensor cast(const at::Tensor& t, const Buffer& b, const char* name, int64_t index) const {
    const at::ScalarType type = scalar_type(b.dtype);
    TORCH_CHECK(t.device() == device, kOp, ": ", name, " ", index, " must be on ", device, ", got ", t.device());
    TORCH_CHECK_TYPE(t.is_floating_point(), kOp, ": ", name, " ", index, " must be ", type, ", got ", t.scalar_type());
    return t.scalar_type() == type ? t : t.to(type);
  }

  int64_t rows(const Buffer& b) const {
    switch (b.space) {
      case Space::kInner:
        return extent.num_vertices - extent.leaves;
      case Space::kEdges:
        return extent.num_edges;
      case Space::kVector:
        return 1;
      default:
        return extent.num_vertices;
    }
  }
  void put(size_t i, at::Tensor tensor) {
    const int64_t stride = program.buffers[i].space == Space::kVector ? 0 : tensor.stride(0);
    put(i, tensor.numel() > 0 ? tensor.data_ptr() : nullptr, stride);
    tensors[i] = std::move(tensor);
  }
  void put(size_t i, void* data, int64_t stride) {
    const Buffer& b = program.buffers[i];
    const bool callers = b.space >= Space::kInput && b.space != Space::kVector;
    // Kernels count rows from the first vertex.
    const int64_t before = b.space == Space::kInner ? extent.leaves * stride : 0;
    if (data != nullptr) data = static_cast<char*>(data) - before * int64_t(c10::elementSize(scalar_type(b.dtype)));
    places[i] = {data, stride, callers ? arrays.vertices : nullptr, b.space == Space::kEdges};
  }

  void check_size(at::TensorList list, const Buffer& b, const char* name) const {
    TORCH_CHECK_VALUE(b.index < static_cast<int64_t>(list.size()), kOp, ": the program reads ", name, " ", b.index,
                      ", got ", list.size());
    const at::Tensor& t = list[b.index];
    TORCH_CHECK_VALUE(t.numel() == rows(b) * b.width && (b.space == Space::kVector || t.dim() == 2), kOp, ": ", name,
                      " ", b.index, " must have ", rows(b), " rows of ", b.width, ", got ", t.sizes());
  }
  // A caller's tensor: rows of `width` neighbouring columns.
  at::Tensor given(at::TensorList list, const Buffer& b, const char* name) const {
    check_size(list, b, name);
    const at::Tensor t = cast(list[b.index], b, name, b.index);
    if (b.space == Space::kVector) return t.contiguous();  // of any shape: its one row has no stride
    return t.stride(1) == 1 || b.width == 1 || t.numel() == 0 ? t : t.contiguous();
  }

  at::TensorOptions options(DType dtype) const { return at::TensorOptions().dtype(scalar_type(dtype)).device(device); }

  // What is in a buffer that the executor makes before anything is written to it. Slots without a child are read as
  // zeros, and so may be rows that only other functions write.
  enum Filled { kZero, kMissing, kAnything };
  Filled filled(size_t buffer) const {
    const Buffer& b = program.buffers[buffer];
    if (published != nullptr && (*published)[buffer]) return kMissing;
    const int64_t slots = int64_t{numbers[Schedule::kColumns]} * (extent.num_vertices - extent.leaves);
    const bool full = b.space == Space::kEdges || (b.space == Space::kInner && numbers[Schedule::kUses] == slots);
    return b.zeros || !together || (b.scattered && !full) ? kZero : kAnything;
  }
  int64_t bytes(size_t buffer) const {
    const Buffer& b = program.buffers[buffer];
    return rows(b) * b.width * static_cast<int64_t>(element_size(b.dtype));
  }
  using Fill = std::function<void(void* first, int byte, size_t count)>;
  static constexpr int byte_of(Filled filled) { return filled == kMissing ? 0xff : 0; }

  // A buffer that somebody outside keeps.
  void make(size_t buffer, const Fill& fill) {
    const Buffer& b = program.buffers[buffer];
    at::Tensor made = at::empty({rows(b), b.width}, options(b.dtype));
    const Filled how = filled(buffer);
    if (how != kAnything && made.numel() > 0) {
      fill(made.data_ptr(), byte_of(how), made.nbytes());
      if (how == kMissing) missing.emplace_back(made.data_ptr(), made.nbytes());
    }
    put(buffer, std::move(made));
  }

  // Buffers that nobody outside gets, in one allocation with `others` bytes behind them, where the pointer is: what is
  // filled in the same way is filled together.
  struct Own {
    size_t buffer;
    Filled filled;
    std::optional<size_t> like;  // the number of another of them, whose memory it shares
  };
  std::pair<at::Tensor, char*> make_own(std::span<const Own> own, int64_t others, const Fill& fill) {
    constexpr int64_t kAligned = 128;
    std::array<int64_t, 3> sizes{};
    std::vector<int64_t> first(own.size());
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i].like) continue;
      first[i] = sizes[own[i].filled];
      sizes[own[i].filled] += ceil_div(bytes(own[i].buffer), kAligned) * kAligned;
    }
    const std::array<int64_t, 3> begin = {0, sizes[kZero], sizes[kZero] + sizes[kMissing]};
    const int64_t end = begin[kAnything] + sizes[kAnything];
    at::Tensor all = at::empty({end + others}, at::TensorOptions().dtype(at::kByte).device(device));
    auto* const data = static_cast<char*>(all.data_ptr());
    for (const Filled filled : {kZero, kMissing}) {
      if (sizes[filled] == 0) continue;
      fill(data + begin[filled], byte_of(filled), static_cast<size_t>(sizes[filled]));
      if (filled == kMissing) missing.emplace_back(data + begin[filled], static_cast<size_t>(sizes[filled]));
    }
    for (size_t i = 0; i < own.size(); ++i) {
      const size_t where = own[i].like.value_or(i);
      const bool empty = bytes(own[i].buffer) == 0;
      put(own[i].buffer, empty ? nullptr : data + begin[own[where].filled] + first[where],
          program.buffers[own[i].buffer].width);
    }
    return {std::move(all), data + end};
  }

  Memory memory(const Fill& fill) const {
    Memory m{program, arrays, places, matrix_places, matrix_gradients, vector_gradients};
    m.most_blocks = scripts.most_blocks;
    m.groups = scripts.groups;
    // What products would have waited for are zeros again.
    m.unpublish = [this, fill] {
      for (const auto& [first, count] : missing) fill(first, 0, count);
    };
    for (size_t pass = 0; pass < kPasses; ++pass) {
      if (scripts.of[pass].empty()) continue;
      const auto at = reinterpret_cast<const int32_t*>(scripts.of[pass].data()) - numbers.data();
      m.scripts[pass] = reinterpret_cast<const ScriptInstruction*>(pointer<int32_t>(schedule) + at);
      m.apart[pass] = scripts.apart(pass);
    }
    return m;
  }

  // The number of the first of the last tasks that are small.
  size_t tail(const std::vector<Step>& steps) const {
    const TailLimit limit = tail_limit(program, steps);
    const std::span<const Task> tasks = extent.tasks;
    size_t first = tasks.size();
    for (; first > 0; --first) {
      const Task& task = tasks[first - 1];
      const int64_t rows = std::max(task.count, task.num_edges);
      if (task.level == 0 || !in_tail(limit, rows)) break;
    }
    return first + 2 < tasks.size() ? first : tasks.size();
  }

  // Where one kernel takes over; a script has all tasks.
  size_t first_of_tail(const std::vector<Step>& steps, const Memory& memory, Executor& executor, bool backward) const {
    if (memory.most_blocks > 0) {
      if (executor.has_script(backward)) return 0;
      memory.unpublish();
    }
    const size_t first = tail(steps);
    return first < extent.tasks.size() && executor.has_tail(backward) ? first : extent.tasks.size();
  }

  const Program& program;
  at::Tensor schedule, host_schedule;
  std::span<const int32_t> numbers;
  at::Device device;
  Arrays arrays;
  Extent extent;
  bool together = true;
  std::vector<at::Tensor> matrices, tensors;
  std::vector<Place> places;
  Scripts scripts;
  const std::vector<char>* published = nullptr;  // buffers whose values are waited for: each is missing at first
  std::vector<Matrix> matrix_places, matrix_gradients, vector_gradients;
  std::vector<std::pair<void*, size_t>> missing;  // memory of what is waited for
};

at::Tensor of_type(const at::Tensor& t, at::ScalarType type) {
  return t.scalar_type() == type ? t : t.to(type);
}

Run::Fill filler(Executor& executor) {
  return [&executor](void* first, int byte, size_t count) { executor.fill(first, byte, count); };
}

// That the program computes the gradients that are asked for.
void check_numbers(const std::vector<int32_t>& computed, at::IntArrayRef wanted, const char* name) {
  TORCH_CHECK_VALUE(std::is_sorted(wanted.begin(), wanted.end()) &&
                        std::includes(computed.begin(), computed.end(), wanted.begin(), wanted.end()),
                    kOp, "_backward: the program computes gradients of the ", name, " ", computed, ", not of ", wanted);
}

}  // namespace

std::vector<at::Tensor> run_forward(const Operands& operands, std::array<int64_t, 3> sizes, Executor& executor) {
  Run r(operands, Pass::kForward);
  const Extent& e = r.extent;
  const std::array<int64_t, 3> planned = {e.num_vertices, e.num_vertices - e.leaves, e.num_edges};
  TORCH_CHECK_VALUE(sizes == planned, kOp, ": the schedule has ", at::IntArrayRef(planned),
                    " vertices, vertices with children and edges, expected ", at::IntArrayRef(sizes));
  const auto& buffers = r.program.buffers;
  const std::vector<int32_t> results = r.program.results();
  const Run::Fill fill = filler(executor);
  std::vector<Run::Own> own;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.backward || b.space == Space::kOutputGrad) continue;
    if (b.space == Space::kInput) {
      r.put(i, r.given(operands.inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(operands.vectors, b, "vector"));
    } else if (std::find(results.begin(), results.end(), static_cast<int32_t>(i)) != results.end()) {
      r.make(i, fill);
    } else {
      own.push_back({i, r.filled(i), {}});
    }
  }
  const auto kept = r.make_own(own, 0, fill);
  std::vector<at::Tensor> made;
  for (const int32_t i : results) made.push_back(r.tensors[i]);
  const Memory memory = r.memory(fill);
  executor.begin(memory);
  const size_t tail = r.first_of_tail(r.program.forward, memory, executor, /*backward=*/false);
  executor.run(forward_pass(r.program, e, tail), e.tasks, /*backward=*/false);
  return made;
}

std::vector<at::Tensor> run_backward(at::TensorList grads, const Operands& operands, at::TensorList saved,
                                     at::IntArrayRef of_inputs, at::IntArrayRef of_matrices, at::IntArrayRef of_vectors,
                                     bool overlap, Executor& executor) {
  Run r(operands, Pass::kBackward);
  const Program& p = r.program;
  const Extent& e = r.extent;
  check_numbers(p.gradients.inputs, of_inputs, "inputs");
  check_numbers(p.gradients.matrices, of_matrices, "matrices");
  check_numbers(p.gradients.vectors, of_vectors, "vectors");
  std::map<int64_t, at::Tensor> input_grads, matrix_grads, vector_grads;
  const Run::Fill fill = filler(executor);
  std::vector<Run::Own> own;
  size_t next = 0;
  for (size_t i = 0; i < p.buffers.size(); ++i) {
    const Buffer& b = p.buffers[i];
    if (b.saved) {
      TORCH_CHECK_VALUE(next < saved.size(), kOp, "_backward: the program saves more than ", saved.size(), " tensors");
      const at::Tensor& t = saved[next++];
      TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) == r.rows(b) && t.size(1) == b.width && t.device() == r.device, kOp,
                        "_backward: saved tensor ", next - 1, " is not what the forward pass saved");
      r.put(i, of_type(t, scalar_type(b.dtype)).contiguous());
    } else if (!b.read_backward && b.space == Space::kInput) {
      continue;
    } else if (!b.read_backward && b.space == Space::kVector) {
      r.check_size(operands.vectors, b, "vector");  // its gradient has the size of what is given
    } else if (b.space == Space::kInput) {
      r.put(i, r.given(operands.inputs, b, "input"));
    } else if (b.space == Space::kVector) {
      r.put(i, r.given(operands.vectors, b, "vector"));
    } else if (b.space == Space::kOutputGrad) {
      r.put(i, r.given(grads, b, "gradient"));
    } else if (b.space == Space::kInputGrad) {
      r.check_size(operands.inputs, b, "input");
      // Columns that nothing depends on are written by nobody.
      const std::array<int64_t, 2> shape = {r.rows(b), b.width};
      r.put(i, b.written ? at::empty(shape, r.options(b.dtype)) : at::zeros(shape, r.options(b.dtype)));
      input_grads[b.index] = r.tensors[i];
    } else if (b.space == Space::kLayerGrad) {
      own.push_back({i, b.written ? Run::kAnything : Run::kZero, {}});
    } else if (b.backward) {
      own.push_back({i, r.filled(i), {}});
    }
  }
  const auto kept = r.make_own(own, 0, fill);
  for (const Step& s : p.backward) {
    if (s.kind == Step::Kind::kOuter && std::binary_search(of_matrices.begin(), of_matrices.end(), s.matrix)) {
      at::Tensor& found = matrix_grads[s.matrix];
      if (found.defined()) continue;
      const Buffer& source = p.buffers[s.source];
      found = at::empty({source.width, p.buffers[s.target].width}, r.options(source.dtype));
      TORCH_CHECK_VALUE(s.matrix < static_cast<int64_t>(operands.matrices.size()), kOp,
                        "_backward: the program has matrix ", s.matrix, ", got ", operands.matrices.size());
      TORCH_CHECK_VALUE(found.sizes() == operands.matrices[s.matrix].sizes(), kOp, "_backward: the gradient of matrix ",
                        s.matrix, " is ", found.sizes(), ", got ", operands.matrices[s.matrix].sizes());
      r.matrix_gradients[s.matrix] = Run::place(found, source.dtype);
    }
    if (s.kind == Step::Kind::kTotal && std::binary_search(of_vectors.begin(), of_vectors.end(), s.vector)) {
      at::Tensor& found = vector_grads[s.vector];
      if (found.defined()) continue;
      TORCH_CHECK_VALUE(s.vector < static_cast<int64_t>(operands.vectors.size()), kOp,
                        "_backward: the program has vector ", s.vector, ", got ", operands.vectors.size());
      const DType registers = p.doubles ? DType::f64 : DType::f32;
      found = at::empty(operands.vectors[s.vector].sizes(), r.options(registers));
      const int64_t width = found.numel();
      r.vector_gradients[s.vector] = {width > 0 ? found.data_ptr() : nullptr, 1, width, width, 1, registers};
    }
  }
  const Memory memory = r.memory(fill);
  executor.begin(memory);
  const size_t tail = r.first_of_tail(p.backward, memory, executor, /*backward=*/true);
  executor.run(backward_pass(p, e, tail, overlap, {of_inputs, of_matrices, of_vectors}), e.tasks, /*backward=*/true);

  std::vector<at::Tensor> results;
  const auto give = [&](const std::map<int64_t, at::Tensor>& found, at::IntArrayRef numbers, at::TensorList of) {
    for (const int64_t number : numbers) {
      const at::Tensor gradient = of_type(found.at(number), of[number].scalar_type());
      // A view is a tensor of its own: most need none.
      const bool same = gradient.sizes() == of[number].sizes();
      results.push_back(same ? gradient : gradient.view(of[number].sizes()));
    }
  };
  give(input_grads, of_inputs, operands.inputs);
  give(matrix_grads, of_matrices, operands.matrices);
  give(vector_grads, of_vectors, operands.vectors);
  return results;
}

void run_training(const Operands& operands, bool zeroes_grads, int64_t others,
                  const std::function<void(void*, int, size_t)>& fill,
                  const std::function<void(const Memory&, float*)>& launch) {
  Run r(operands, Pass::kTraining);
  TORCH_CHECK_VALUE(!r.scripts.of[static_cast<size_t>(Pass::kTraining)].empty(), kOp,
                    "_training: the schedule has no script of a training step");
  const auto& buffers = r.program.buffers;
  std::vector<Run::Own> own;
  std::map<std::pair<Space, int32_t>, size_t> callers;  // functions that push the same, or read its gradient, share it
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.space == Space::kInput) {
      at::Tensor x = r.given(operands.inputs, b, "input");
      // As products read rows of fours.
      const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && x.stride(0) % 4 == 0;
      const bool fits = aligned || b.width % 4 != 0 || x.numel() == 0;
      r.put(i, fits ? std::move(x) : x.clone(at::MemoryFormat::Contiguous));
      continue;
    }
    if (b.space == Space::kVector) {
      r.put(i, r.given(operands.vectors, b, "vector"));
      continue;
    }
    TORCH_CHECK_TYPE(b.dtype == DType::f32, kOp, "_training: it is not float32 alone");
    Run::Filled filled = r.filled(i);
    if (b.space == Space::kOutputGrad) filled = zeroes_grads ? Run::kZero : Run::kAnything;
    if (b.space == Space::kInputGrad || b.space == Space::kLayerGrad) {
      filled = b.written ? Run::kAnything : Run::kZero;
    }
    std::optional<size_t> like;
    if (b.space == Space::kOutput || b.space == Space::kOutputGrad) {
      const auto [known, first] = callers.try_emplace({b.space, b.index}, own.size());
      if (!first) like = known->second;
    }
    own.push_back({i, filled, like});
  }
  const auto [all, behind] = r.make_own(own, others * static_cast<int64_t>(sizeof(float)), fill);
  launch(r.memory(fill), reinterpret_cast<float*>(behind));
}

}  // namespace weft::vertex
