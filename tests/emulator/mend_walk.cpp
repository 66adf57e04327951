// The walk of csrc/scan/slices/cuda/mend_walk.cuh, by warps of any speed. The caller compares.
#include "warp_operations.h"

#include "scan/slices/cuda/mend_walk.cuh"

using namespace weft::scan;

namespace {

SliceMend mend;
SliceStates states;
SliceGradients gradients;
int64_t slabs_per_row;

template <typename S, bool kGradients>
void kernel() {
  if constexpr (kGradients) {
    run_mend_walk<S, true>(mend, gradients, slabs_per_row, emulator::current->block->shared);
  } else {
    run_mend_walk<S, false>(mend, states, slabs_per_row, emulator::current->block->shared);
  }
}

template <typename S, bool kGradients>
void launch(unsigned seed) {
  using W = WalkShape<S, kGradients, true>;
  slabs_per_row = (mend.H + W::kWidth - 1) / W::kWidth;
  emulator::launch(kernel<S, kGradients>, int(slabs_per_row * mend.B), 32, 1, W::kSharedBytes, seed);
}

}  // namespace

// The mending of slice_kernels.cpp, with what it is given there for `which` 1, 4 and 5.
extern "C" void run(int which, int wide, int flag, const int64_t* s, void* const* p) {
  const auto dtype = wide ? weft::DType::f64 : weft::DType::f32;
  const bool has_gradients = which == 5 || (which == 1 && flag == 1);
  states = {}, gradients = {}, mend = {};
  mend.T = s[0], mend.B = s[1], mend.H = s[2], mend.dtype = dtype, mend.gradients = has_gradients;
  mend.A_t = mend.x_t = mend.before_t = mend.grad_A_t = s[3];
  mend.A_b = mend.x_b = mend.before_b = mend.grad_A_b = s[4];
  if (which == 4) {
    states = {p[0],
              s[5],
              s[1],
              s[2],
              0,
              s[6],
              false,
              false,
              wide != 0,
              p[1],
              p[2],
              static_cast<double*>(p[3]),
              static_cast<int32_t*>(p[4])};
    mend.A = p[5], mend.x = p[6], mend.state = p[1];
  } else if (which == 5) {
    gradients = {p[0], static_cast<const double*>(p[1]), s[5], s[1], s[2], 0, s[6], false, flag == 1, wide != 0, p[2]};
    mend.A = p[3], mend.x = p[4], mend.before = p[5], mend.first = p[6], mend.grad_A = p[7], mend.state = p[2];
  } else {
    mend.A = p[0], mend.state = p[1], mend.came = static_cast<int32_t*>(p[2]), mend.x = p[3];
    mend.before = p[4], mend.first = p[5], mend.grad_A = p[6];
  }
  weft::when.seed(unsigned(s[0]));
  if (has_gradients) {
    wide ? launch<double, true>(3) : launch<float, true>(3);
  } else {
    wide ? launch<double, false>(3) : launch<float, false>(3);
  }
}
