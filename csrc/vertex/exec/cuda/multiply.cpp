#include "vertex/exec/cuda/multiply.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>

#include <algorithm>
#include <limits>

namespace weft::vertex {
namespace {

int size(int64_t n) {
  TORCH_CHECK(n <= std::numeric_limits<int>::max(), "vertex_frontiers: cuBLAS takes sizes below 2^31, got ", n);
  return static_cast<int>(n);
}

// As cuBLAS sees it, a matrix by rows is transposed already, which is what both factors shall be.
struct Operand {
  Operand(const Factor& f, int64_t columns) {
    const bool by_rows = f.column_stride == 1 && f.row_stride >= std::max<int64_t>(1, columns);
    operation = by_rows ? CUBLAS_OP_N : CUBLAS_OP_T;
    leading = size(std::max<int64_t>(1, by_rows ? f.row_stride : f.column_stride));
  }
  cublasOperation_t operation;
  int leading;
};

}  // namespace

void multiply(DType dtype, int64_t rows, int64_t columns, int64_t inner, const Factor& left, const Factor& right,
              void* result, int64_t stride, bool more) {
  // torch's own wrappers are not exported.
  const cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  const Operand a(right, columns), b(left, inner);
  const int m = size(columns), n = size(rows), k = size(inner), ldc = size(stride);
  const float one = 1, beta = more ? 1 : 0;
  if (dtype == DType::f64) {
    const double wide_one = 1, wide_beta = beta;
    TORCH_CUDABLAS_CHECK(cublasDgemm(
        handle, a.operation, b.operation, m, n, k, &wide_one, static_cast<const double*>(right.data), a.leading,
        static_cast<const double*>(left.data), b.leading, &wide_beta, static_cast<double*>(result), ldc));
  } else if (dtype == DType::f32) {
    TORCH_CUDABLAS_CHECK(
        cublasSgemm(handle, a.operation, b.operation, m, n, k, &one, static_cast<const float*>(right.data), a.leading,
                    static_cast<const float*>(left.data), b.leading, &beta, static_cast<float*>(result), ldc));
  } else {
    const cudaDataType type = dtype == DType::f16 ? CUDA_R_16F : CUDA_R_16BF;
    TORCH_CUDABLAS_CHECK(cublasGemmEx(handle, a.operation, b.operation, m, n, k, &one, right.data, type, a.leading,
                                      left.data, type, b.leading, &beta, result, type, ldc, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT));
  }
}

}  // namespace weft::vertex
