// What vertex/exec/cuda/float_products.jit.cu is launched with. For hosts and kernels.
#pragma once

namespace weft::vertex {

// A factor of a product, by neighbours along the inner dimension or across it. The former are aligned to 16 bytes, and
// so are their rows.
struct FloatFactor {
  const float* data;
  long long stride;  // in elements: between what is not neighbours
  bool by_inner;
};

// result (rows, columns), by rows `stride` apart, = left (rows, inner) @ right (inner, columns) + bias, a row or null,
// added to it where `more`. No size is 0.
struct FloatProduct {
  FloatFactor left, right;
  float* result;
  long long stride;
  const float* bias;
  int rows, columns, inner;
  bool more;
  // Of units of work, a piece of the inner dimension of a tile each, and of tiles: how many the products before have.
  int units_before, tiles_before;
};

constexpr int kMostFloatProducts = 16;
constexpr int kFloatTile = 128, kFloatDepth = 32, kFloatThreads = 256;
// What a block has in shared memory: twice three numbers of bf16 for each of both factors' tiles, with gaps that keep
// their rows in different banks, and a flag.
constexpr int kFloatOctet = (kFloatTile + 2) * 16, kFloatPlane = kFloatDepth / 8 * kFloatOctet;
constexpr int kFloatStage = 2 * 3 * kFloatPlane, kFloatShared = 2 * kFloatStage + 16;

// All of them at once: their units of work are dealt to the blocks evenly, in their order.
struct FloatProducts {
  FloatProduct of[kMostFloatProducts];
  int count, units, tiles;
  float* partial;     // two tiles for each block
  unsigned* arrived;  // for each tile, 0
};

// Of a product.
constexpr int float_tiles(int numbers) {
  return (numbers + kFloatTile - 1) / kFloatTile;
}
constexpr int float_chunks(int inner) {
  return (inner + kFloatDepth - 1) / kFloatDepth;
}

// After the others.
inline void add(FloatProducts& all, const FloatProduct& p) {
  FloatProduct& added = all.of[all.count++];
  added = p;
  added.units_before = all.units;
  added.tiles_before = all.tiles;
  const int tiles = float_tiles(p.rows) * float_tiles(p.columns);
  all.tiles += tiles;
  all.units += tiles * float_chunks(p.inner);
}

// The block of `blocks` that has a unit of work, and its first.
constexpr int block_of_unit(int unit, int units, int blocks) {
  return static_cast<int>(((unit + 1LL) * blocks - 1) / units);
}
constexpr int first_unit(int block, int units, int blocks) {
  return static_cast<int>(static_cast<long long>(units) * block / blocks);
}

}  // namespace weft::vertex
