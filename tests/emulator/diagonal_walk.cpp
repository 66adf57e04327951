// The walk of csrc/scan/linear/cuda/diagonal_walk.cuh: a scan or its gradients by warps of any speed. The caller
// compares.
#include "emulator.h"

#include "scan/linear/cuda/diagonal_walk.cuh"

namespace {

using namespace weft::scan;

DiagonalGradients problem;
int64_t slabs_per_row;
void* message;

template <typename T, bool kGradients>
void kernel() {
  run_walk<T, kGradients, MANY>(problem, slabs_per_row, emulator::current->block->shared);
}

template <typename T>
void told_kernel() {
  run_walk<T, false, MANY, true>(problem, slabs_per_row, emulator::current->block->shared, message);
}

template <typename T, bool kGradients>
void launch(unsigned seed) {
  using S = WalkShape<T, kGradients, MANY>;
  slabs_per_row = (problem.scan.H + S::kWidth - 1) / S::kWidth;
  emulator::launch(kernel<T, kGradients>, int(slabs_per_row * problem.scan.B), 32, 1, S::kSharedBytes, seed);
}

}  // namespace

#if SIZE > 2 && !COMPLEX
// A scan, and what a rank tells of the slice that it is.
extern "C" void run_told(const DiagonalGradients* given, void* to, unsigned seed) {
  using T = std::conditional_t<SIZE == 4, float, double>;
  using S = WalkShape<T, false, MANY>;
  weft::when.seed(seed);
  problem = *given, message = to;
  slabs_per_row = (problem.scan.H + S::kWidth - 1) / S::kWidth;
  emulator::launch(told_kernel<T>, int(slabs_per_row * problem.scan.B), 32, 1, S::kSharedBytes, seed);
}
#endif

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
