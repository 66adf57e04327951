// The kernels of pointwise_scan, whose step is in step.h: chunks of any speed meet at barriers in any order. The caller
// compares.
//   BACKWARD   which of the two
#include "emulator.h"

static emulator::Index gridDim;
static const emulator::Index blockDim{128};

inline void atomicMax(unsigned long long* to, unsigned long long value) {
  emulator::yield();
  *to = std::max(*to, value);
}

// After which the macros are defined that kernels are compiled for.
#include "step.h"

#if BACKWARD
#include "scan/pointwise/cuda/backward.jit.cu"
#else
#include "scan/pointwise/cuda/forward.jit.cu"
#endif

static const PointwiseArgs* arguments;

extern "C" void run(const PointwiseArgs* args, int blocks, unsigned seed) {
  arguments = args;
  gridDim.x = blocks;
#if BACKWARD
  emulator::launch([] { pointwise_backward(*arguments); }, blocks, 128, 1, 0, seed);
#else
  emulator::launch([] { pointwise_forward(*arguments); }, blocks, 128, 1, 0, seed);
#endif
}
