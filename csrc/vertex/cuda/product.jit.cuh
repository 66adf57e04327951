// What vertex/cuda/product.jit.cu is launched with. For hosts and kernels.
#pragma once

namespace weft::vertex {

struct ProductArguments {
  const float *a, *b;
  float* c;
  long long a_stride, b_stride, c_stride;  // between rows, or where rows are contiguous, columns
  int rows, columns, inner;
  int depth;       // of the sum's parts, a multiple of kProductDeep
  long long part;  // elements from a part of c to the next
};

constexpr int kProductDeep = 16, kProductStages = 4;

// A warp has 32 x 32 of a tile.
constexpr int product_threads(int tile_rows, int tile_columns) {
  return tile_rows * tile_columns / 32;
}
constexpr int product_shared(int tile_rows, int tile_columns) {
  return kProductStages * (tile_rows + tile_columns) * kProductDeep * 4;
}

}  // namespace weft::vertex
