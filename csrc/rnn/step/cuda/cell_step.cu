// The kernels of cell_step.cuh and their launches.
#include "rnn/step/cuda/cell_step.cuh"

#include <cstdint>

#include "common/launch.cuh"
#include "rnn/step/cuda/cell_step.h"

namespace weft::rnn {
namespace {

constexpr int kThreads = 32 * kCellWarps;

template <Cell C, typename scalar, int NB, int N>
__global__ void __launch_bounds__(kThreads) few_kernel(CellForwardArgs args) {
  cell_forward_few<C, scalar, NB, N>(args, blockIdx.x, threadIdx.x);
}

template <Cell C, typename scalar>
__global__ void __launch_bounds__(kThreads) gates_kernel(CellForwardArgs args) {
  cell_forward_gates<C, scalar>(args, int64_t(blockIdx.x) * kThreads + threadIdx.x);
}

template <Cell C, typename scalar>
__global__ void __launch_bounds__(kThreads) backward_kernel(CellBackwardArgs args) {
  cell_backward_step<C, scalar>(args, int64_t(blockIdx.x) * kCellWarps + threadIdx.x / 32, threadIdx.x % 32);
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <Cell C, typename scalar>
void forward(const CellForwardArgs& a, cudaStream_t stream) {
  if (a.in != nullptr) {
    return launch("rnn_cell_gates", gates_kernel<C, scalar>, ceil_div(a.B * a.H, kThreads), dim3(kThreads), 0, stream,
                  a);
  }
  constexpr int kVector = 16 / sizeof(scalar);
  bool aligned = a.I % kVector == 0 && a.P % kVector == 0;
  for (const void* p : {a.input, a.h, a.w_ih, a.w_hh}) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const auto run = [&](auto kernel, int64_t NB) {
    launch("rnn_cell", kernel, ceil_div(a.H, kCellWarps) * ceil_div(a.B, NB), dim3(kThreads), 0, stream, a);
  };
  if (a.B == 1) {
    run(aligned ? few_kernel<C, scalar, 1, kVector> : few_kernel<C, scalar, 1, 1>, 1);
  } else if (a.B <= 4) {
    run(aligned ? few_kernel<C, scalar, 4, kVector> : few_kernel<C, scalar, 4, 1>, 4);
  } else {
    run(aligned ? few_kernel<C, scalar, 8, kVector> : few_kernel<C, scalar, 8, 1>, 8);
  }
}

template <Cell C, typename scalar>
void backward(const CellBackwardArgs& a, cudaStream_t stream) {
  const bool sum = a.b_ih != nullptr || a.b_hh != nullptr;
  const int64_t warps = ceil_div(a.H, kBackwardUnits) * (sum ? 1 : ceil_div(a.B, kBackwardRows));
  launch("rnn_cell_backward", backward_kernel<C, scalar>, ceil_div(warps, kCellWarps), dim3(kThreads), 0, stream, a);
}

template <typename F>
void with_types(CellElement element, Cell cell, F f) {
  const auto of = [&]<typename scalar>() { with_cell(cell, [&]<Cell C>() { f.template operator()<C, scalar>(); }); };
  switch (element) {
    case CellElement::kHalf:
      return of.template operator()<__half>();
    case CellElement::kBFloat16:
      return of.template operator()<__nv_bfloat16>();
    case CellElement::kFloat:
      return of.template operator()<float>();
    case CellElement::kDouble:
      return of.template operator()<double>();
  }
}

}  // namespace

void cell_step_forward(CellElement element, const CellForwardArgs& args, cudaStream_t stream) {
  with_types(element, args.cell, [&]<Cell C, typename scalar>() { forward<C, scalar>(args, stream); });
}

void cell_step_backward(CellElement element, const CellBackwardArgs& args, cudaStream_t stream) {
  with_types(element, args.cell, [&]<Cell C, typename scalar>() { backward<C, scalar>(args, stream); });
}

}  // namespace weft::rnn
