#include "rnn/persistent/cuda/multiply.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>

#include <algorithm>

namespace weft::rnn {
namespace {

// Of an operand of one product.
constexpr int64_t kMaxElements = int64_t{1} << 30;

}  // namespace

void multiply(RecurrenceType type, int64_t m, int64_t n, int64_t k, Matrix left, Matrix right, void* out,
              int64_t out_stride, bool accumulate, const Heads& heads) {
  if (m == 0 || n == 0 || (k == 0 && accumulate)) return;
  // Operands of 2^31 elements have ended in illegal memory accesses in several versions of cuBLAS. What is long here
  // are the rows of all steps: those of left, and with them those of out, or of right where left is transposed.
  const int64_t rows = left.transposed ? k : m;
  const int64_t widest = std::max({left.stride, left.transposed ? right.stride : out_stride, int64_t{1}});
  const int64_t slice = std::max<int64_t>(1, kMaxElements / widest);
  if (rows > slice) {
    const int64_t bytes = element_bytes(type);
    const auto advanced = [&](Matrix matrix, int64_t first) {
      matrix.data = static_cast<const char*>(matrix.data) + first * matrix.stride * bytes;
      return matrix;
    };
    for (int64_t first = 0; first < rows; first += slice) {
      const int64_t count = std::min(slice, rows - first);
      if (left.transposed) {
        multiply(type, m, n, count, advanced(left, first), advanced(right, first), out, out_stride,
                 accumulate || first > 0, heads);
      } else {
        multiply(type, count, n, k, advanced(left, first), right, static_cast<char*>(out) + first * out_stride * bytes,
                 out_stride, accumulate, heads);
      }
    }
    return;
  }
  const auto element = type == RecurrenceType::kHalf       ? CUDA_R_16F
                       : type == RecurrenceType::kBFloat16 ? CUDA_R_16BF
                                                           : CUDA_R_32F;
  const auto compute = type == RecurrenceType::kTF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  // torch sets the mode again whenever it takes the handle. Sums in half precision only where the user allows them;
  // products of floats have none.
  const auto allows = [](auto option) { return option == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK; };
  const bool reduced = type == RecurrenceType::kHalf ? allows(at::globalContext().allowFP16ReductionCuBLAS())
                                                     : allows(at::globalContext().allowBF16ReductionCuBLAS());
  TORCH_CUDABLAS_CHECK(
      cublasSetMathMode(handle, reduced ? CUBLAS_DEFAULT_MATH : CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  const float one = 1, scale = accumulate ? 1 : 0;
  // cuBLAS is column-major, in which a row-major matrix is its transpose.
  if (heads.count > 1) {
    TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx_64(
        handle, right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
        &one, right.data, element, right.stride, heads.right, left.data, element, left.stride, heads.left, &scale, out,
        element, out_stride, heads.out, heads.count, compute, CUBLAS_GEMM_DEFAULT));
    return;
  }
  TORCH_CUDABLAS_CHECK(cublasGemmEx_64(handle, right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                       left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, right.data, element,
                                       right.stride, left.data, element, left.stride, &scale, out, element, out_stride,
                                       compute, CUBLAS_GEMM_DEFAULT));
}

}  // namespace weft::rnn
