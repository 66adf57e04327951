// The kernel of csrc/vertex/exec/cuda/float_products.jit.cu as a function. The caller compares.
#include "emulator.h"

static emulator::Index gridDim;

#include "vertex/exec/cuda/float_products.jit.cu"

static FloatProducts products;

extern "C" void run(int count, const FloatProduct* given, int blocks, float* partial, unsigned* arrived,
                    unsigned seed) {
  products = {};
  for (int i = 0; i < count; ++i) weft::vertex::add(products, given[i]);
  products.partial = partial;
  products.arrived = arrived;
  gridDim.x = blocks;
  emulator::launch([] { vertex_float_products(products); }, blocks, kThreads, 1, weft::vertex::kFloatShared, seed);
}
