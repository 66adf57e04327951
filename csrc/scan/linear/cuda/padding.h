// The sizes that the kernels for small H are compiled for. Torch-free.
#pragma once
#include <cstdint>

namespace weft::scan {

// H <= 32 padded to a size that has kernels. 20 has its own: it is BPPSA's, and 24 would cost it a fifth.
constexpr int padded_hidden(int64_t H) {
  return H <= 8 ? 8 : H <= 16 ? 16 : H <= 20 ? 20 : H <= 24 ? 24 : 32;
}

// Which of these sizes, from 0, to look up a table by.
constexpr int kHiddenSizes = 5;
constexpr int hidden_size_index(int64_t H) {
  return H <= 8 ? 0 : H <= 16 ? 1 : H <= 20 ? 2 : H <= 24 ? 3 : 4;
}

// Floats of a row of a chunk's map of S states, S a multiple of 4: an odd number of 16 bytes, so that eight lanes that
// read 16 bytes of a row each meet no bank conflict.
constexpr int64_t map_row(int64_t S) {
  return S % 8 == 4 ? S : S + 4;
}

// Floats of the map, see MapLayout in chunk_maps.cuh: P, v and the columns' exponents.
constexpr int64_t map_floats(int64_t S) {
  return S * map_row(S) + 2 * S;
}

}  // namespace weft::scan
