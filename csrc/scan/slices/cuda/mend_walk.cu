// Launches of mend_walk.cuh.
#include "scan/slices/cuda/mend_walk.cuh"

#include <cuda_bf16.h>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"

namespace weft::scan {
namespace {

template <typename S, bool kGradients>
__global__ void __launch_bounds__(32)
    mend_walk_kernel(const __grid_constant__ SliceMend m, const __grid_constant__ Between<kGradients> between,
                     int64_t slabs_per_row) {
  extern __shared__ __align__(128) unsigned char memory[];
  run_mend_walk<S, kGradients>(m, between, slabs_per_row, memory);
}

// Rows that lie end to end are one.
void merge_rows(SliceMend& m) {
  const bool of_A = m.grad_A != nullptr;
  if (m.B == 1 || (m.A_b == m.H && m.x_b == m.H && (!of_A || (m.before_b == m.H && m.grad_A_b == m.H)))) {
    m.H *= m.B;
    m.B = 1;
  }
}

// Whether all rows begin and end at multiples of 16 bytes.
bool in_pieces(const SliceMend& m, int64_t size) {
  auto aligned = [&](const void* base, int64_t stride_t, int64_t stride_b) {
    return base == nullptr || (reinterpret_cast<uintptr_t>(base) % 16 == 0 && (m.T == 1 || stride_t * size % 16 == 0) &&
                               (m.B == 1 || stride_b * size % 16 == 0));
  };
  return m.H * size % 16 == 0 && aligned(m.A, m.A_t, m.A_b) && aligned(m.x, m.x_t, m.x_b) &&
         (m.grad_A == nullptr ||
          (aligned(m.before, m.before_t, m.before_b) && aligned(m.grad_A, m.grad_A_t, m.grad_A_b)));
}

template <typename S, bool kGradients>
bool run(SliceMend m, const Between<kGradients>& between, cudaStream_t stream) {
  using W = WalkShape<S, kGradients, true>;
  merge_rows(m);
  // The scan walks by long stages where warps are fewer (DiagonalCosts): there blocks of many warps mend as fast.
  const bool many = m.B * ceil_div(m.H, int64_t(32)) > 2 * int64_t(device_limits().sm_count);
  if (!many || !in_pieces(m, sizeof(S))) return false;
  const int64_t slabs_per_row = ceil_div(m.H, int64_t(W::kWidth));
  launch(kGradients ? "slice_mend_gradients_walk" : "slice_mend_walk", mend_walk_kernel<S, kGradients>,
         Grid(slabs_per_row * m.B), dim3(32), W::kSharedBytes, stream, m, between, slabs_per_row);
  return true;
}

}  // namespace

bool mend_by_walk(const SliceMend& m, const SliceStates& states, const SliceGradients& gradients, cudaStream_t stream) {
  const auto run_of = [&]<typename S>(S*) {
    return m.gradients ? run<S, true>(m, gradients, stream) : run<S, false>(m, states, stream);
  };
  if (m.dtype == DType::bf16) return run_of(static_cast<__nv_bfloat16*>(nullptr));
  return m.dtype == DType::f64 ? run_of(static_cast<double*>(nullptr)) : run_of(static_cast<float*>(nullptr));
}

}  // namespace weft::scan
