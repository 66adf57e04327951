// The walks of csrc/scan/readout/cuda/readout_walk.cuh: a scan that is read out, or its gradients. The caller compares.
#include "emulator.h"

inline int __shfl_sync(unsigned, int x, int lane) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return int(emulator::gather(&bits, 1)[lane][0]);
}
inline double __shfl_xor_sync(unsigned, double x, int lanes) {
  uint32_t words[2];
  std::memcpy(words, &x, 8);
  const uint32_t* other = emulator::gather(words, 2)[emulator::current->lane ^ lanes];
  std::memcpy(&x, other, 8);
  return x;
}

#include "scan/readout/cuda/readout_walk.cuh"

namespace {

using namespace weft::scan;

ReadOutGradients problem;
int lanes;
bool whole;

template <typename T, Reads kReads, bool kGradients>
void kernel() {
  const auto* block = emulator::current->block;
  if constexpr (kGradients) {
    run_readout_gradients<T, kReads>(problem, lanes, whole, blockIdx.x, block->shared);
  } else {
    run_readout<T, kReads>(problem.scan, lanes, whole, blockIdx.x);
  }
}

template <typename T, Reads kReads, bool kGradients>
void launch(unsigned seed) {
  const int64_t channels = problem.scan.B * problem.scan.H, per_warp = 32 >> lanes;
  emulator::launch(kernel<T, kReads, kGradients>, int((channels + per_warp - 1) / per_warp), 32, 1,
                   ReadOutShape<T, kReads>::kSharedBytes, seed);
}

}  // namespace

extern "C" int problem_bytes() {
  return int(sizeof(ReadOutGradients));
}

extern "C" void run(const ReadOutGradients* given, int reads, bool gradients, bool aligned, unsigned seed) {
  using Real = std::conditional_t<SIZE == 2, weft::BFloat16, std::conditional_t<SIZE == 4, float, double>>;
  using Pair = Complex<std::conditional_t<SIZE == 8, float, double>>;
  using T = std::conditional_t<COMPLEX, Pair, Real>;
  problem = *given;
  whole = aligned;
  for (lanes = 0; (int64_t(kReadOutStates) << lanes) < problem.scan.N; ++lanes) {
  }
  const auto run_of = [&]<Reads kReads>() {
    gradients ? launch<T, kReads, true>(seed) : launch<T, kReads, false>(seed);
  };
  if (reads == 0) return run_of.template operator()<Reads::kOne>();
  if (reads == 1) return run_of.template operator()<Reads::kFull>();
  run_of.template operator()<Reads::kEach>();
}
