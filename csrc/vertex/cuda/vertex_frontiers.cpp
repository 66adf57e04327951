// vertex_frontiers on CUDA: a compiled kernel per step, launched once per task; products are cuBLAS's. The host runs
// ahead of the device: nothing here waits for it, so calls can be captured in a CUDA graph.
#include "vertex/vertex_frontiers.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <type_traits>

#include "common/check.h"
#include "common/integers.h"
#include "jit/jit.h"
#include "vertex/cuda/frontier.jit.cuh"
#include "vertex/source.h"

namespace weft::vertex {
namespace {

constexpr const char* kSource = "vertex/cuda/frontier.jit.cu";
constexpr int kThreads = 128;

class CudaExecutor final : public Executor {
 public:
  void begin(const Frontier& frontier) override {
    program_ = &frontier.program;
    single_ = frontier.dtype == at::kFloat;
    stream_ = at::cuda::getCurrentCUDAStream();
    device_ = at::cuda::current_device();
    places_ = frontier.places;
    const Arrays& a = frontier.arrays;
    arguments_.vertices = a.vertices;
    arguments_.gather = a.gather;
    arguments_.first_edge = a.first_edge;
    arguments_.edge_children = a.edge_children;
    arguments_.edge_parents = a.edge_parents;
    arguments_.first_use = a.first_use;
    arguments_.use_rows = a.use_rows;
    arguments_.use_columns = a.use_columns;
    arguments_.first_sum_use = a.first_sum_use;
    arguments_.sum_use_edges = a.sum_use_edges;
    arguments_.num_vertices = a.num_vertices;
  }

  void kernel(const Step& step, int64_t first, int64_t count) override {
    TORCH_CHECK_VALUE(step.buffers.size() <= size_t{kMaxFrontierBuffers}, "vertex_frontiers: a kernel of ",
                      step.buffers.size(), " buffers, at most ", kMaxFrontierBuffers, " are possible");
    for (size_t i = 0; i < step.buffers.size(); ++i) {
      arguments_.data[i] = places_[step.buffers[i]].data;
      arguments_.stride[i] = places_[step.buffers[i]].stride;
    }
    int from = static_cast<int>(first), rows = static_cast<int>(count);
    void* arguments[] = {&arguments_, &from, &rows};
    const int64_t blocks = ceil_div(count * lanes(step), kThreads);
    compiled(step).launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, 0, false, stream_, arguments);
  }

  // Row-major matrices are cuBLAS's transposed: target^T = matrix^T source^T.
  void product(const Step& step, const at::Tensor& source, const at::Tensor& matrix, const at::Tensor& target,
               int64_t first, int64_t count) override {
    const bool rows_contiguous = matrix.stride(1) == 1 && matrix.stride(0) >= std::max<int64_t>(1, matrix.size(1));
    const bool columns_contiguous = matrix.stride(0) == 1 && matrix.stride(1) >= std::max<int64_t>(1, matrix.size(0));
    const at::Tensor dense = rows_contiguous || columns_contiguous ? matrix : matrix.contiguous();
    const bool by_rows = rows_contiguous || !columns_contiguous;
    // As cuBLAS sees it, a matrix by rows is transposed already, which is what the left factor shall be.
    const char form = by_rows != step.transposed ? 'n' : 't';
    const int64_t leading = by_rows ? dense.stride(0) : dense.stride(1);
    const int64_t inner = source.size(1), columns = target.size(1);
    if (columns == 0) return;
    if (inner == 0) {
      target.narrow(0, first, count).zero_();
    } else if (single_) {
      multiply<float>(form, columns, count, inner, dense, leading, source, target, first);
    } else {
      multiply<double>(form, columns, count, inner, dense, leading, source, target, first);
    }
  }

 private:
  template <typename T>
  static void multiply(char form, int64_t columns, int64_t count, int64_t inner, const at::Tensor& matrix,
                       int64_t leading, const at::Tensor& source, const at::Tensor& target, int64_t first) {
    // torch's own wrappers are not exported. Its handle is on the current stream and follows its setting of TF32.
    const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
    const cublasOperation_t operation = form == 'n' ? CUBLAS_OP_N : CUBLAS_OP_T;
    const int m = size(columns), n = size(count), k = size(inner), lda = size(leading);
    const T *a = matrix.const_data_ptr<T>(), *b = source.const_data_ptr<T>() + first * inner;
    T* c = target.mutable_data_ptr<T>() + first * columns;
    const T one = 1, zero = 0;
    if constexpr (std::is_same_v<T, float>) {
      TORCH_CUDABLAS_CHECK(cublasSgemm(handle, operation, CUBLAS_OP_N, m, n, k, &one, a, lda, b, k, &zero, c, m));
    } else {
      TORCH_CUDABLAS_CHECK(cublasDgemm(handle, operation, CUBLAS_OP_N, m, n, k, &one, a, lda, b, k, &zero, c, m));
    }
  }

  static int size(int64_t n) {
    TORCH_CHECK(n <= std::numeric_limits<int>::max(), "vertex_frontiers: cuBLAS takes sizes below 2^31, got ", n);
    return static_cast<int>(n);
  }

  // Threads of a row.
  static int64_t lanes(const Step& step) { return step.reduces ? 32 : step.width; }

  jit::Kernel& compiled(const Step& step) {
    std::atomic<void*>& known = step.compiled->of[device_ % 64][single_];
    if (void* found = known.load(std::memory_order_acquire)) return *static_cast<jit::Kernel*>(found);
    const jit::Defines defines = {std::string("WEFT_VERTEX_TYPE=") + (single_ ? "float" : "double"),
                                  "WEFT_VERTEX_WIDTH=" + std::to_string(step.width),
                                  "WEFT_VERTEX_LANES=" + std::to_string(lanes(step)),
                                  "WEFT_VERTEX_BODY=" + kernel_body(*program_, step)};
    jit::Kernel& made = jit::kernel(kSource, defines, "vertex_frontier");
    known.store(&made, std::memory_order_release);
    return made;
  }

  const Program* program_ = nullptr;
  std::span<const Place> places_;
  bool single_ = true;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  FrontierArguments arguments_{};
};

std::vector<at::Tensor> forward(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                const at::Tensor& schedule, const at::Tensor& host_schedule, const at::Tensor& program,
                                const at::Tensor& constants, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(schedule.device());
  CudaExecutor executor;
  return run_forward(inputs, matrices, vectors, schedule, host_schedule, program, constants, dtype, executor);
}

std::vector<at::Tensor> backward(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                 at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                 const at::Tensor& host_schedule, const at::Tensor& program,
                                 const at::Tensor& constants, at::ScalarType dtype) {
  const c10::cuda::CUDAGuard guard(schedule.device());
  CudaExecutor executor;
  return run_backward(grads, inputs, matrices, vectors, saved, schedule, host_schedule, program, constants, dtype,
                      executor);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("vertex_frontiers", forward);
  m.impl("vertex_frontiers_backward", backward);
}

}  // namespace weft::vertex
