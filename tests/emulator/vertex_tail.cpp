// The kernel of the last frontiers of a vertex function, whose steps are in steps.h, as a function.
#include "emulator.h"

static emulator::Index gridDim;

#include "steps.h"
// After which WEFT_VERTEX_STEPS is defined.
#include "vertex/exec/cuda/tail.jit.cu"

using Buffers = Many<BufferArgument, WEFT_VERTEX_BUFFERS>;
using Matrices = Many<MatrixArgument, WEFT_VERTEX_MATRICES>;

static const TailArguments* arguments;
static const Buffers* buffers;
static const Matrices* matrices;

extern "C" void run(const TailArguments* a, const Buffers* b, const Matrices* m, int blocks, unsigned seed) {
  arguments = a;
  buffers = b;
  matrices = m;
  gridDim.x = blocks;
  emulator::launch([] { vertex_tail(*arguments, *buffers, *matrices); }, blocks, weft::vertex::kTailThreads, 1,
                   weft::vertex::kTailShared, seed);
}
