// The persistent kernel of a pass of a vertex function, whose steps are in steps.h, as a function.
#include "emulator.h"

static emulator::Index gridDim;

#include "steps.h"
// After which WEFT_VERTEX_STEPS is defined.
#include "vertex/exec/cuda/persistent.jit.cu"

using Buffers = Many<BufferArgument, WEFT_VERTEX_BUFFERS>;
using Matrices = Many<MatrixArgument, WEFT_VERTEX_MATRICES>;

static const PersistentArguments* arguments;
static const Buffers* buffers;
static const Matrices* matrices;

#ifdef WEFT_VERTEX_UPDATES
using Updates = Many<UpdateArgument, WEFT_VERTEX_UPDATES>;

static const TrainingArguments* training;
static const Updates* updates;
#endif

extern "C" long long copied_bytes() {
  return weft::copied_bytes;
}

extern "C" void run(const PersistentArguments* a, const Buffers* b, const Matrices* m, const void* t, const void* u,
                    int blocks, long shared_bytes, unsigned seed) {
  gridDim.x = blocks;
  arguments = a;
  buffers = b;
  matrices = m;
#ifdef WEFT_VERTEX_UPDATES
  training = static_cast<const TrainingArguments*>(t);
  updates = static_cast<const Updates*>(u);
  const auto kernel = [] { vertex_persistent(*arguments, *buffers, *matrices, *training, *updates); };
#else
  const auto kernel = [] { vertex_persistent(*arguments, *buffers, *matrices); };
#endif
  emulator::launch(kernel, blocks, kPersistentThreads, 1, shared_bytes, seed);
}
