// vertex_frontiers on CUDA: a compiled kernel per step, launched once per task; products are cuBLAS's. The host runs
// ahead of the device: nothing here waits for it, so calls can be captured in a CUDA graph. Gradients of matrices run
// on a second stream.
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
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/device.h"
#include "common/integers.h"
#include "jit/jit.h"
#include "jit/too_many_blocks.h"
#include "vertex/exec/aten_executor.h"
#include "vertex/exec/cuda/frontier.jit.cuh"
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

  void begin(const Memory& memory) override {
    AtenExecutor::begin(memory);
    program_ = &memory.program;
    stream_ = at::cuda::getCurrentCUDAStream();
    device_ = at::cuda::current_device();
    const Arrays& a = memory.arrays;
    arguments_.vertices = a.vertices;
    arguments_.gather = a.gather;
    arguments_.first_edge = a.first_edge;
    arguments_.edge_children = a.edge_children;
    arguments_.edge_parents = a.edge_parents;
    arguments_.first_use = a.first_use;
    arguments_.users = a.users;
    arguments_.first_sum_use = a.first_sum_use;
    arguments_.sum_use_edges = a.sum_use_edges;
    arguments_.num_vertices = a.num_vertices;
  }

  bool has_tail(bool backward) override {
    const size_t bytes = sizeof(TailArguments) + memory().buffers.size() * sizeof(BufferArgument) +
                         memory().matrices.size() * sizeof(MatrixArgument);
    const bool fits = bytes <= size_t{kMaxParameterBytes};
    if (!program_->fused || !fits || at::cuda::getCurrentDeviceProperties()->major < 8) return false;
    return compiled_tail(backward).blocks > 0;
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

  // Row-major matrices are cuBLAS's transposed: target^T = matrix^T source^T.
  void product(const Step& step, int64_t first, int64_t count) override {
    if (step.when != Step::When::kFrontiers) return AtenExecutor::product(step, first, count);
    const Matrix& matrix = memory().matrices[step.matrix];
    const Place &source = memory().buffers[step.source], &target = memory().buffers[step.target];
    const bool by_rows = matrix.column_stride == 1 && matrix.row_stride >= std::max<int64_t>(1, matrix.columns);
    // As cuBLAS sees it, a matrix by rows is transposed already, which is what the left factor shall be.
    const char form = by_rows != step.transposed ? 'n' : 't';
    const int64_t leading = by_rows ? matrix.row_stride : matrix.column_stride;
    const int64_t inner = program_->buffers[step.source].width, columns = program_->buffers[step.target].width;
    if (columns == 0) return;
    if (inner == 0) return zero(step, first, count);
    // torch's own wrappers are not exported. Its handle is on the current stream and follows its setting of TF32.
    const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
    const cublasOperation_t operation = form == 'n' ? CUBLAS_OP_N : CUBLAS_OP_T;
    const int m = size(columns), n = size(count), k = size(inner), lda = size(leading);
    const auto bytes = static_cast<int64_t>(c10::elementSize(scalar_type(matrix.dtype)));
    const void *a = matrix.data, *b = static_cast<const char*>(source.data) + first * inner * bytes;
    void* c = static_cast<char*>(target.data) + first * columns * bytes;
    if (matrix.dtype == Dtype::kFloat64) {
      const double one = 1, zero = 0;
      TORCH_CUDABLAS_CHECK(cublasDgemm(handle, operation, CUBLAS_OP_N, m, n, k, &one, static_cast<const double*>(a),
                                       lda, static_cast<const double*>(b), k, &zero, static_cast<double*>(c), m));
      return;
    }
    const float one = 1, zero = 0;
    if (matrix.dtype == Dtype::kFloat32) {
      TORCH_CUDABLAS_CHECK(cublasSgemm(handle, operation, CUBLAS_OP_N, m, n, k, &one, static_cast<const float*>(a), lda,
                                       static_cast<const float*>(b), k, &zero, static_cast<float*>(c), m));
      return;
    }
    const cudaDataType type = matrix.dtype == Dtype::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
    TORCH_CUDABLAS_CHECK(cublasGemmEx(handle, operation, CUBLAS_OP_N, m, n, k, &one, a, type, lda, b, type, k, &zero, c,
                                      type, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

  bool tail(std::span<const Task> tasks, size_t first, bool backward) override {
    const Tail& kernel = compiled_tail(backward);
    TailArguments a{arguments_};
    buffers_.clear();
    for (size_t b = 0; b < memory().buffers.size(); ++b) buffers_.push_back(argument(static_cast<int32_t>(b)));
    std::vector<MatrixArgument> matrices;
    for (const Matrix& m : memory().matrices) matrices.push_back({m.data, m.row_stride, m.column_stride});
    if (matrices.empty()) matrices.emplace_back();
    const at::Tensor arrived = at::empty({1}, at::TensorOptions().dtype(at::kInt).device(at::kCUDA, device_));
    AT_CUDA_CHECK(cudaMemsetAsync(arrived.mutable_data_ptr(), 0, sizeof(int), stream_));
    const int count = static_cast<int>(tasks.size() - first);
    a.tasks = memory().arrays.tasks;
    a.first = static_cast<int>(backward ? tasks.size() - 1 : first);
    a.count = count;
    a.apart = backward ? -1 : 1;
    a.arrived = static_cast<unsigned*>(arrived.mutable_data_ptr());
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

  static int size(int64_t n) {
    TORCH_CHECK(n <= std::numeric_limits<int>::max(), "vertex_frontiers: cuBLAS takes sizes below 2^31, got ", n);
    return static_cast<int>(n);
  }

  // Threads of a row.
  static int64_t lanes(const Step& step) { return step.reduces ? 32 : step.width / columns_each(step); }

  jit::Kernel& compiled(const Step& step, bool leaves) {
    std::atomic<void*>& known = step.compiled->of[device_ % 64][leaves];
    if (void* found = known.load(std::memory_order_acquire)) return *static_cast<jit::Kernel*>(found);
    const jit::Defines defines = {std::string("WEFT_VERTEX_TYPE=") + (program_->doubles ? "double" : "float"),
                                  "WEFT_VERTEX_BUFFERS=" + std::to_string(step.buffers.size()),
                                  "WEFT_VERTEX_WIDTH=" + std::to_string(step.width),
                                  "WEFT_VERTEX_LANES=" + std::to_string(lanes(step)),
                                  "WEFT_VERTEX_BODY=" + kernel_body(*program_, step, leaves, columns_each(step))};
    jit::Kernel& made = jit::kernel(kSource, defines, "vertex_frontier");
    known.store(&made, std::memory_order_release);
    return made;
  }

  struct Tail {
    jit::Kernel& kernel;
    int blocks;  // one on each multiprocessor, or 0 where not even that many are resident at once
  };

  const Tail& compiled_tail(bool backward) {
    std::atomic<void*>& known = program_->tails->of[device_ % 64][backward];
    if (void* found = known.load(std::memory_order_acquire)) return *static_cast<Tail*>(found);
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
    if (!known.compare_exchange_strong(found, tail.get(), std::memory_order_acq_rel, std::memory_order_acquire)) {
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
