// vertex_frontiers on CUDA: a compiled kernel per step, launched once per task; products are cuBLAS's, those of layers
// and gradients of floats one kernel where there are many rows (float_products.jit.cu), sums of vectors another
// (totals.cu). The host runs ahead of the device: nothing here waits for it, so calls can be captured in a CUDA graph.
// Gradients of matrices run on a second stream while frontiers run.
//
// The last frontiers, which are small, are one kernel each way (tail.jit.cu).
//
// Cost. A training step of a binary Tree-LSTM on sentiment trees, H = X = 256, fp32, measured on an H200, in ms; of few
// trees, called from Python, the host takes longer:
//
//   trees                                1     25    64    256
//   device, captured in a CUDA graph     0.29  0.54  0.72  1.5
//   floor                                0.05  0.06  0.1   0.45   50 barriers of 0.94 us; 60 TFLOP/s
#include "vertex/exec/vertex_frontiers.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Exceptions.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/cuda/tf32.h"
#include "common/device.h"
#include "common/integers.h"
#include "jit/jit.h"
#include "jit/too_many_blocks.h"
#include "vertex/exec/aten_executor.h"
#include "vertex/exec/cuda/counters.h"
#include "vertex/exec/cuda/float_products.h"
#include "vertex/exec/cuda/frontier.jit.cuh"
#include "vertex/exec/cuda/multiply.h"
#include "vertex/exec/cuda/persistent.h"
#include "vertex/exec/cuda/totals.h"
#include "vertex/program/object.h"
#include "vertex/program/source.h"

namespace weft::vertex {
namespace {

constexpr const char* kSource = "vertex/exec/cuda/frontier.jit.cu";
constexpr const char* kTailSource = "vertex/exec/cuda/tail.jit.cu";
constexpr int kThreads = 128;

class CudaExecutor final : public AtenExecutor {
 public:
  explicit CudaExecutor(at::Device device) : AtenExecutor(device) {}

  void fill(void* first, int byte, size_t count) override {
    cuda_check(cudaMemsetAsync(first, byte, count, at::cuda::getCurrentCUDAStream()), "cudaMemsetAsync");
  }

  void begin(const Memory& memory) override {
    AtenExecutor::begin(memory);
    program_ = &memory.program;
    stream_ = at::cuda::getCurrentCUDAStream();
    device_ = at::cuda::current_device();
    arguments_ = arguments_of(memory.arrays);
  }

  bool has_tail(bool backward) override {
    const size_t bytes = sizeof(TailArguments) + memory().buffers.size() * sizeof(BufferArgument) +
                         memory().matrices.size() * sizeof(MatrixArgument);
    const bool fits = bytes <= size_t{kMaxParameterBytes};
    if (!program_->fused || !fits || at::cuda::getCurrentDeviceProperties()->major < 8) return false;
    return compiled_tail(backward).blocks > 0;
  }

  bool has_script(bool backward) override {
    return memory().scripts[backward ? 1 : 0] != nullptr && persistent(backward).most_groups >= memory().groups;
  }

  ~CudaExecutor() override {
    try {
      CudaExecutor::join();
    } catch (const std::exception&) {  // an error is on its way already
    }
  }

 protected:
  void kernel(const Step& step, int64_t first, int64_t count, bool leaves) override {
    TORCH_CHECK_VALUE(step.buffers.size() <= size_t{kMaxFrontierBuffers}, "vertex_frontiers: a kernel of ",
                      step.buffers.size(), " buffers, at most ", kMaxFrontierBuffers, " are possible");
    buffers_.clear();
    for (const int32_t b : step.buffers) buffers_.push_back(argument(b));
    int from = static_cast<int>(first), rows = static_cast<int>(count);
    void* arguments[] = {&arguments_, buffers_.data(), &from, &rows};
    const int64_t blocks = ceil_div(count * lanes(step), kThreads);
    compiled(step, leaves).launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, 0, false, stream_, arguments);
  }

  void product(const Step& step, int64_t first, int64_t count) override {
    if (step.bias >= 0) return AtenExecutor::product(step, first, count);
    const Matrix& m = memory().matrices[step.matrix];
    const Factor matrix = {m.data, step.transposed ? m.column_stride : m.row_stride,
                           step.transposed ? m.row_stride : m.column_stride};
    const int64_t inner = width(step.source), columns = width(step.target);
    if (columns == 0) return;
    if (inner == 0) return zero(step, first, count);
    multiply(m.dtype, count, columns, inner, {row(step.source, first), stride(step.source), 1}, matrix,
             row(step.target, first), stride(step.target), /*more=*/false);
  }

  void outer(const Step& step, int64_t first, int64_t count, bool more) override {
    const Matrix& m = memory().matrix_gradients[step.matrix];
    if (m.rows == 0 || m.columns == 0) return;
    if (count == 0) {
      if (!more) zero(step, first, count);
      return;
    }
    multiply(m.dtype, m.rows, m.columns, count, {row(step.source, first), 1, stride(step.source)},
             {row(step.target, first), stride(step.target), 1}, m.data, m.row_stride, more);
  }

  // Those of floats in one launch, as far as that is faster than cuBLAS.
  void products(std::span<const Entry> entries) override {
    // A launch of whole multiprocessors would hold up what runs beside it.
    if (takes_tf32(at::Float32Op::MATMUL) || entries[0].aside) return AtenExecutor::products(entries);
    FloatProducts all{};
    std::vector<const Entry*> others;
    for (const Entry& e : entries) {
      const std::optional<FloatProduct> p = float_product(e);
      if (p && takes(*p) && all.count < kMostFloatProducts) {
        add(all, *p);
      } else {
        others.push_back(&e);
      }
    }
    if (!worth_float_products(all)) return AtenExecutor::products(entries);
    const at::Tensor partial = at::empty({float_product_blocks(all) * int64_t{kPartialOfBlock}},
                                         at::TensorOptions().dtype(at::kFloat).device(device()));
    const Counters arrived = zeros(all.tiles);
    all.partial = static_cast<float*>(partial.mutable_data_ptr());
    all.arrived = reinterpret_cast<unsigned*>(arrived.first);
    launch_float_products(all, at::cuda::getCurrentCUDAStream());
    for (const Entry* e : others) run_product(*e);
  }

  void totals(std::span<const Entry> entries) override {
    TotalsLaunch launch{};
    int64_t rows = 0;
    int count = 0;
    std::vector<int32_t> vectors;  // each once
    for (const Entry& e : entries) {
      if (std::find(vectors.begin(), vectors.end(), e.step->vector) == vectors.end()) vectors.push_back(e.step->vector);
    }
    for (const int32_t v : vectors) {
      const auto mine = [&](const Entry& e) { return e.step->vector == v; };
      const auto terms = std::count_if(entries.begin(), entries.end(), mine);
      if (terms > kMaxTotals) return AtenExecutor::totals(entries);
      if (count + terms > kMaxTotals || launch.num_vectors == kMaxTotalVectors) {
        run(launch, rows);
        launch = {};
        rows = count = 0;
      }
      const Matrix& m = memory().vector_gradients[v];
      TotalVector& vector = launch.vectors[launch.num_vectors++];
      vector = {m.data, static_cast<int32_t>(m.columns), count, count + static_cast<int32_t>(terms), launch.groups};
      launch.groups += static_cast<int32_t>(ceil_div(m.columns, 32));
      for (const Entry& e : entries) {
        if (!mine(e)) continue;
        const Step& s = *e.step;
        const char* source = static_cast<const char*>(row(s.source, e.first));
        launch.totals[count++] = {source + s.column * bytes(s.source), stride(s.source), e.count, s.width, s.first,
                                  program_->buffers[s.source].dtype};
        rows = std::max(rows, e.count);
      }
    }
    run(launch, rows);
  }

  bool tail(std::span<const Task> tasks, size_t first, bool backward) override {
    if (first == 0 && memory().scripts[backward ? 1 : 0] != nullptr) {
      const Counters arrived = zeros(counters_of(memory()));
      const bool launched =
          launch_persistent(persistent(backward), memory(), backward ? Pass::kBackward : Pass::kForward,
                            reinterpret_cast<unsigned*>(arrived.first), stream_);
      if (!launched) memory().unpublish();
      return launched;
    }
    const Counters arrived = zeros(1);
    const Tail& kernel = compiled_tail(backward);
    TailArguments a{arguments_};
    buffers_.clear();
    for (size_t b = 0; b < memory().buffers.size(); ++b) buffers_.push_back(argument(static_cast<int32_t>(b)));
    std::vector<MatrixArgument> matrices;
    for (const Matrix& m : memory().matrices) matrices.push_back({m.data, m.row_stride, m.column_stride});
    if (matrices.empty()) matrices.emplace_back();
    const int count = static_cast<int>(tasks.size() - first);
    a.tasks = memory().arrays.tasks;
    a.first = static_cast<int>(backward ? tasks.size() - 1 : first);
    a.count = count;
    a.apart = backward ? -1 : 1;
    a.arrived = reinterpret_cast<unsigned*>(arrived.first);
    void* arguments[] = {&a, buffers_.data(), matrices.data()};
    try {
      kernel.kernel.launch(dim3(static_cast<unsigned>(kernel.blocks)), dim3(kTailThreads), kTailShared, 0,
                           /*cooperative=*/true, stream_, arguments);
    } catch (const jit::TooManyBlocks&) {  // as where processes share a device
      return false;
    }
    return true;
  }

  // On another stream. In a capture on the same: a capture's memory belongs to its one stream's order.
  void begin_aside() override {
    if (at::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
    const c10::cuda::CUDAStream main = c10::cuda::getCurrentCUDAStream(), side = side_stream(main.device_index());
    at::cuda::CUDAEvent ready;
    ready.record(main);
    ready.block(side);
    aside_ = side;
    guard_.emplace(side);
  }
  void end_aside() override { guard_.reset(); }

  // No tensor needs to be told of the other stream: what it reads is freed on this one, which waits for it first.
  void join() override {
    guard_.reset();
    if (!aside_) return;
    at::cuda::CUDAEvent done;
    done.record(*aside_);
    done.block(c10::cuda::getCurrentCUDAStream());
    aside_.reset();
  }

 private:
  // One per device, because cuBLAS keeps a workspace for every stream.
  static c10::cuda::CUDAStream side_stream(c10::DeviceIndex device) {
    static std::mutex mutex;
    static std::map<c10::DeviceIndex, c10::cuda::CUDAStream> streams;
    const std::lock_guard lock(mutex);
    const auto found = streams.find(device);
    if (found != streams.end()) return found->second;
    return streams.emplace(device, c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)).first->second;
  }

  int64_t width(int32_t buffer) const { return program_->buffers[buffer].width; }
  int64_t bytes(int32_t buffer) const { return static_cast<int64_t>(element_size(program_->buffers[buffer].dtype)); }
  int64_t stride(int32_t buffer) const { return memory().buffers[buffer].stride; }
  void* row(int32_t buffer, int64_t first) const {
    return static_cast<char*>(memory().buffers[buffer].data) + first * stride(buffer) * bytes(buffer);
  }

  // A large product or gradient, where all of it is float and there is something to multiply.
  std::optional<FloatProduct> float_product(const Entry& e) const {
    const Step& s = *e.step;
    const bool outer = s.kind == Step::Kind::kOuter;
    const Matrix& m = outer ? memory().matrix_gradients[s.matrix] : memory().matrices[s.matrix];
    const auto is_float = [&](int32_t buffer) { return program_->buffers[buffer].dtype == DType::f32; };
    if (m.dtype != DType::f32 || !is_float(s.source) || !is_float(s.target)) return std::nullopt;
    const int64_t from = width(s.source), to = width(s.target);
    constexpr int64_t kMost = 1 << 30;
    if (std::min({e.count, from, to}) == 0 || std::max({e.count, from, to}) > kMost) return std::nullopt;
    const auto of_rows = [&](int32_t buffer, bool by_inner) {
      return FloatFactor{static_cast<const float*>(row(buffer, e.first)), stride(buffer), by_inner};
    };
    FloatProduct p{};
    const int count = static_cast<int>(e.count), inner = static_cast<int>(from), columns = static_cast<int>(to);
    if (outer) {
      if (m.column_stride != 1) return std::nullopt;
      p.left = of_rows(s.source, false), p.right = of_rows(s.target, false);
      p.result = static_cast<float*>(m.data), p.stride = m.row_stride, p.more = e.more;
      p.rows = inner, p.columns = columns, p.inner = count;
      return p;
    }
    const int64_t inner_stride = s.transposed ? m.column_stride : m.row_stride,
                  column_stride = s.transposed ? m.row_stride : m.column_stride;
    const bool by_inner = inner_stride == 1;
    if (!by_inner && column_stride != 1) return std::nullopt;
    p.left = of_rows(s.source, true);
    p.right = {static_cast<const float*>(m.data), by_inner ? column_stride : inner_stride, by_inner};
    p.result = static_cast<float*>(row(s.target, e.first)), p.stride = stride(s.target);
    p.bias = s.bias < 0 ? nullptr : static_cast<const float*>(row(s.bias, 0));
    p.rows = count, p.columns = columns, p.inner = inner;
    return p;
  }

  // Counters for a kernel of this pass. Of a graph one fill serves all of them: it would be a node each.
  Counters zeros(int count) {
    if (at::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
      return zeroed_counters(count);
    }
    constexpr int kOfPass = 2048;
    if (!zeros_.owner.defined() || used_zeros_ + count > zeros_.owner.numel()) {
      zeros_ = zeroed_counters(std::max(count, kOfPass));
      used_zeros_ = 0;
    }
    int* const first = zeros_.first + used_zeros_;
    used_zeros_ += count;
    return {first, zeros_.owner};
  }

  void run(TotalsLaunch& launch, int64_t rows) {
    if (launch.groups == 0) return;
    launch.pieces = totals_pieces(rows, launch.groups, device_limits().sm_count);
    at::Tensor partial;
    Counters arrived{};
    if (launch.pieces > 1) {
      const auto type = program_->doubles ? at::kDouble : at::kFloat;
      partial =
          at::empty({launch.pieces, int64_t{launch.groups} * 32}, at::TensorOptions().dtype(type).device(device()));
      arrived = zeros(launch.groups);
      launch.partial = partial.mutable_data_ptr();
      launch.arrived = arrived.first;
    }
    launch_totals(launch, program_->doubles, stream_);
  }

  // Threads of a row.
  static int64_t lanes(const Step& step) { return step.reduces ? 32 : step.width / columns_each(step); }

  jit::Kernel& compiled(const Step& step, bool leaves) {
    std::atomic<void*>& handle = step.compiled->of[device_ % 64][leaves];
    if (void* found = handle.load(std::memory_order_acquire)) return *static_cast<jit::Kernel*>(found);
    const jit::Defines defines = {std::string("WEFT_VERTEX_TYPE=") + (program_->doubles ? "double" : "float"),
                                  "WEFT_VERTEX_BUFFERS=" + std::to_string(step.buffers.size()),
                                  "WEFT_VERTEX_WIDTH=" + std::to_string(step.width),
                                  "WEFT_VERTEX_LANES=" + std::to_string(lanes(step)),
                                  "WEFT_VERTEX_BODY=" + kernel_body(*program_, step, leaves, columns_each(step))};
    jit::Kernel& made = jit::kernel(kSource, defines, "vertex_frontier");
    handle.store(&made, std::memory_order_release);
    return made;
  }

  const PersistentKernel& persistent(bool backward) {
    return persistent_kernel(*program_, backward ? Pass::kBackward : Pass::kForward, memory().most_blocks,
                             takes_tf32(at::Float32Op::MATMUL), static_cast<int32_t>(memory().matrices.size()));
  }

  struct Tail {
    jit::Kernel& kernel;
    int blocks;  // one on each multiprocessor, or 0 where not even that many are resident at once
  };

  const Tail& compiled_tail(bool backward) {
    std::atomic<void*>& handle = program_->tails->of[device_ % 64][backward];
    if (void* found = handle.load(std::memory_order_acquire)) return *static_cast<Tail*>(found);
    const jit::Defines defines = {
        std::string("WEFT_VERTEX_TYPE=") + (program_->doubles ? "double" : "float"),
        "WEFT_VERTEX_BUFFERS=" + std::to_string(memory().buffers.size()),
        "WEFT_VERTEX_MATRICES=" + std::to_string(std::max<size_t>(1, memory().matrices.size())),
        "WEFT_VERTEX_STEPS=" + tail_body(*program_, backward ? program_->backward : program_->forward)};
    jit::Kernel& made = jit::kernel(kTailSource, defines, "vertex_tail");
    int resident = std::min(1, made.max_active_blocks_per_sm(dim3(kTailThreads), kTailShared));
    if (!device_limits().cooperative_launch) resident = 0;  // as of some virtual GPUs
    auto tail = std::make_unique<Tail>(Tail{made, resident * made.sm_count()});
    void* found = nullptr;
    if (!handle.compare_exchange_strong(found, tail.get(), std::memory_order_acq_rel, std::memory_order_acquire)) {
      return *static_cast<Tail*>(found);  // another thread's
    }
    return *tail.release();  // lives as long as the kernel
  }

  BufferArgument argument(int32_t buffer) const {
    return {memory().buffers[buffer].data, memory().buffers[buffer].stride};
  }

  const Program* program_ = nullptr;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  std::optional<c10::cuda::CUDAStream> aside_;
  std::optional<c10::cuda::CUDAStreamGuard> guard_;  // while work is put aside
  Counters zeros_{};
  int64_t used_zeros_ = 0;
  FrontierArguments arguments_{};
  std::vector<BufferArgument> buffers_;  // of a launch
};

std::vector<at::Tensor> forward_cuda(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                     const at::Tensor& schedule, const at::Tensor& host_schedule,
                                     const ProgramPointer& program, int64_t num_vertices, int64_t num_inner,
                                     int64_t num_edges) {
  const c10::cuda::CUDAGuard guard(schedule.device());
  CudaExecutor executor(schedule.device());
  return run_forward({inputs, matrices, vectors, schedule, host_schedule, program->program},
                     {num_vertices, num_inner, num_edges}, executor);
}

std::vector<at::Tensor> backward_cuda(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                      at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                      const at::Tensor& host_schedule, const ProgramPointer& program,
                                      at::IntArrayRef of_inputs, at::IntArrayRef of_matrices,
                                      at::IntArrayRef of_vectors, bool overlap) {
  const c10::cuda::CUDAGuard guard(schedule.device());
  CudaExecutor executor(schedule.device());
  return run_backward(grads, {inputs, matrices, vectors, schedule, host_schedule, program->program}, saved, of_inputs,
                      of_matrices, of_vectors, overlap, executor);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("vertex_frontiers", forward_cuda);
  m.impl("vertex_frontiers_backward", backward_cuda);
}

}  // namespace weft::vertex
