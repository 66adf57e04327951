// The kernel of large products of a vertex function, as a function.
#include "emulator.h"
// WEFT_PRODUCT_... are given.
#include "vertex/cuda/product.jit.cu"

static const weft::vertex::ProductArguments* arguments;

extern "C" void run(const weft::vertex::ProductArguments* args, int blocks, unsigned seed) {
  arguments = args;
  emulator::launch([] { vertex_product(*arguments); }, blocks,
                   weft::vertex::product_threads(WEFT_PRODUCT_ROWS, WEFT_PRODUCT_COLUMNS), 1,
                   weft::vertex::product_shared(WEFT_PRODUCT_ROWS, WEFT_PRODUCT_COLUMNS), seed);
}
