#include "vertex/exec/cuda/multiply.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>

#include <algorithm>
#include <limits>

#include "vertex/exec/cuda/float_product.h"

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

bool multiply_floats(int64_t rows, int64_t columns, int64_t inner, const Factor& left, const Factor& right,
                     float* result, int64_t stride, bool more, const float* bias) {
  constexpr double kLeast = 2e9;  // multiply-adds; below, cuBLAS is as fast or faster
  if (static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(inner) < kLeast) return false;
  if (at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
      at::Float32Precision::TF32) {
    return false;
  }
  const bool left_by_inner = left.column_stride == 1 && left.row_stride >= inner;
  const bool right_by_columns = right.column_stride == 1 && right.row_stride >= columns;
  const FloatProduct p = {
      {static_cast<const float*>(left.data), left_by_inner ? left.row_stride : left.column_stride, left_by_inner},
      {static_cast<const float*>(right.data), right_by_columns ? right.row_stride : right.column_stride,
       !right_by_columns},
      result,
      stride,
      bias,
      rows,
      columns,
      inner,
      more};
  if (!takes_float_product(p)) return false;
  launch_float_product(p, at::cuda::getCurrentCUDAStream());
  return true;
}

void multiply(DType dtype, int64_t rows, int64_t columns, int64_t inner, const Factor& left, const Factor& right,
              void* result, int64_t stride, bool more) {
  if (dtype == DType::f32 &&
      multiply_floats(rows, columns, inner, left, right, static_cast<float*>(result), stride, more, nullptr)) {
    return;
  }
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
