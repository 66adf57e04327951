// Products of csrc/jit/resident_product.jit.cuh by two blocks. The caller compares.
#include "emulator.h"

static emulator::Index gridDim;

#include "jit/resident_product.jit.cuh"

using namespace weft;

struct Call {
  const void *matrix, *rows;
  long inner_stride, column_stride, stride;  // of the matrix; between rows
  float* result;                             // rows of all columns, zeros
  long count, columns;
  long between;   // calls of it, or -1 for a product without it
  long repeated;  // so many products one after the other, or 0
};
static Call* call;

template <typename E, Multiply kMultiply, int kInner, int kWidth, bool kPublished>
static void launch(unsigned seed) {
  constexpr int kThreads = 512, kBlocks = 2;
  using Columns = DealtColumns<kBlocks, 0, kWidth, kWidth, kWidth>;
  using Product = ResidentProduct<E, kMultiply, kThreads, kInner, Columns, kPublished>;
  constexpr int kEighths = (Columns::count() + 7) / 8, kWeights = (kInner + 15) / 16 * kEighths * 32;
  const auto kernel = [] {
    auto* const weights = reinterpret_cast<FourOf<E>*>(dynamic_shared_memory());
    auto* const partials = reinterpret_cast<float*>(weights + kWeights);
    const int rank = blockIdx.x;
    const E* const matrix = static_cast<const E*>(call->matrix);
    Product::load(matrix, call->inner_stride, call->column_stride, rank, weights);
    copy_wait<0>();
    __syncthreads();
    const auto source = [](int i) { return static_cast<const E*>(call->rows) + i * call->stride; };
    const auto store = [](int i, int, int column, float sum) { call->result[i * call->columns + column] += sum; };
    if (call->repeated > 0) {
      const bool done = Product::repeated(call->count, rank, weights, [&](auto products) {
        if (!products.takes(call->count)) emulator::fail("another number of rows");
        for (int i = 0; i < call->repeated; ++i) {
          products.run(
              call->count, partials, source, store, [] { ++call->between; }, [] { ++call->between; });
        }
      });
      if (!done) call->between = -1;
    } else if (call->between < 0) {
      Product::run(call->count, rank, weights, partials, source, store);
    } else {
      Product::run_between(
          call->count, rank, weights, partials, source, store, [] { ++call->between; }, [] { ++call->between; });
    }
  };
  emulator::launch(kernel, kBlocks, kThreads, 1, kWeights * sizeof(FourOf<E>) + Product::kPartialBytes, seed);
}

// Of an inner dimension and twice so many columns.
extern "C" void run(int which, Call* given, unsigned seed) {
  call = given;
  switch (which) {
    case 0:  // more chunks than warps
      return launch<float, Multiply::kFloat, 528, 20, true>(seed);
    case 1:  // fewer, and half a tile
      return launch<float, Multiply::kFloat, 40, 4, false>(seed);
    case 2:  // neighbours that are not aligned
      return launch<float, Multiply::kFloat, 37, 30, false>(seed);
    case 3:  // so many columns that only eight rows go together
      return launch<float, Multiply::kFloat, 32, 130, true>(seed);
    case 4:
      return launch<float, Multiply::kTf32, 80, 40, true>(seed);
    case 5:
      return launch<Float16, Multiply::kHalf, 272, 24, true>(seed);
    case 6:  // few columns, of which a lane has all
      return launch<float, Multiply::kFloat, 1280, 4, true>(seed);
    default:
      return launch<BFloat16, Multiply::kHalf, 48, 24, false>(seed);
  }
}
