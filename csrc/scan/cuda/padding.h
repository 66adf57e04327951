// The sizes that the kernels for small H are compiled for. Torch-free.
#pragma once
#include <cstdint>

namespace weft {

// H <= 32 padded to a size that has kernels. 20 has its own: it is BPPSA's, and 24 would cost it a fifth.
constexpr int padded_hidden(int64_t H) {
  return H <= 8 ? 8 : H <= 16 ? 16 : H <= 20 ? 20 : H <= 24 ? 24 : 32;
}

// Floats of a chunk's map of S states, see MapLayout in chunk.cuh: P, v and the columns' exponents.
constexpr int64_t map_floats(int64_t S) {
  return S * S + 2 * S;
}

}  // namespace weft
