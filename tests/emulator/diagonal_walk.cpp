// The walk of csrc/scan/linear/cuda/diagonal_walk.cuh: a scan or its gradients by warps of any speed. The caller
// compares.
#include "emulator.h"

#include "scan/linear/cuda/diagonal_walk.cuh"

namespace {

using namespace weft::scan;

DiagonalGradients problem;
int64_t slabs_per_row;

template <typename T, bool kGradients>
void kernel() {
  run_walk<T, kGradients, MANY>(problem, slabs_per_row, emulator::current->block->shared);
}

template <typename T, bool kGradients>
void launch(unsigned seed) {
  using S = WalkShape<T, kGradients, MANY>;
  slabs_per_row = (problem.scan.H + S::kWidth - 1) / S::kWidth;
  emulator::launch(kernel<T, kGradients>, int(slabs_per_row * problem.scan.B), 32, 1, S::kSharedBytes, seed);
}

}  // namespace

extern "C" void run(const DiagonalGradients* given, bool gradients, unsigned seed) {
  using Real = std::conditional_t<SIZE == 2, weft::BFloat16, std::conditional_t<SIZE == 4, float, double>>;
  using Pair = Complex<std::conditional_t<SIZE == 8, float, double>>;
  using T = std::conditional_t<COMPLEX, Pair, Real>;
  weft::when.seed(seed);
  problem = *given;
  if (gradients) {
    launch<T, true>(seed);
  } else {
    launch<T, false>(seed);
  }
}
