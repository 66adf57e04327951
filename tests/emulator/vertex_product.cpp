// The products of the last frontiers of a vertex function on the tensor cores, as a function.
#include "emulator.h"

static emulator::Index gridDim;

#define WEFT_VERTEX_TYPE float
#define WEFT_VERTEX_STEPS
#include "vertex/cuda/tail.jit.cu"

// Tiles of the size of this number, or for -1 of the size that is chosen.
template <typename E, bool kDots>
static void multiply(const Product<E>& p, int size, unsigned char* memory) {
  switch (size) {
    case 0:
      return by_tiles<kDots, 16, 32>(p, memory);
    case 1:
      return by_tiles<kDots, 32, 32>(p, memory);
    case 2:
      return by_tiles<kDots, 64, 64>(p, memory);
    default:
      return by_best_tiles<kDots>(p, memory);
  }
}

struct Arguments {
  const void *source, *matrix;
  void* target;
  int rows, inner, columns, size, half, dots;
};

static const Arguments* arguments;

template <typename E>
static void of_type() {
  const Arguments& a = *arguments;
  const Product<E> p = {static_cast<const E*>(a.source),
                        a.inner,
                        static_cast<const E*>(a.matrix),
                        a.dots ? 1 : a.columns,
                        a.dots ? a.inner : 1,
                        static_cast<E*>(a.target),
                        a.columns,
                        a.rows,
                        a.inner,
                        a.columns};
  a.dots ? multiply<E, true>(p, a.size, weft::dynamic_shared_memory())
         : multiply<E, false>(p, a.size, weft::dynamic_shared_memory());
}

extern "C" void run(const Arguments* given, int blocks, unsigned seed) {
  arguments = given;
  gridDim.x = blocks;
  emulator::launch([] { arguments->half ? of_type<BFloat16>() : of_type<float>(); }, blocks, weft::vertex::kTailThreads,
                   1, kTailShared, seed);
}
