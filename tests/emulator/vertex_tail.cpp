// The kernel of the last frontiers of a vertex function, whose steps are in steps.h, as a function.
#include "emulator.h"

static emulator::Index gridDim;

#include "steps.h"
// After which WEFT_VERTEX_STEPS is defined.
#include "vertex/exec/cuda/tail.jit.cu"

static const weft::vertex::TailArguments* arguments;

extern "C" void run(const weft::vertex::TailArguments* args, int blocks, unsigned seed) {
  arguments = args;
  gridDim.x = blocks;
  emulator::launch([] { vertex_tail(*arguments); }, blocks, weft::vertex::kTailThreads, 1, weft::vertex::kTailShared,
                   seed);
}
