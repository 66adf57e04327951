// What the files of scan_block share: the chain for kWarpHidden < H <= scan_max_hidden(cell).
#pragma once
#include <cstddef>
#include <cstdint>

#include "rnn/scan/cuda/scan_kernels.h"
#include "scan/linear/cuda/block_chunks.h"

namespace weft::rnn {

// States are dh, in an LSTM dh and dc, each padded to `units`. Chunks are counted from the end of the chain's steps:
// chunk 0 begins at the last step, and the last chunk, whose map is not needed, ends with step 0.
struct BlockGeometry : scan::block::Chunked {
  int units;             // 64, 96 or 128
  const float* weights;  // (G, units, units): w_hh padded with zeros, 16-byte aligned; null with one chunk
};

constexpr int padded_units(int H) {
  return H <= 64 ? 64 : H <= 96 ? 96 : 128;
}

// Bytes of shared memory of the kernel that makes the maps, as ProductMemory lays it out.
constexpr bool holds_weights(Cell cell, int units) {
  return has_c(cell) || (has_gates(cell) && units == 64);
}
constexpr size_t product_shared_bytes(Cell cell, int units) {
  const bool two = has_c(cell), gated = has_gates(cell);
  const size_t tiles = two ? 3 : gated ? 2 : 1;
  size_t floats = holds_weights(cell, units) ? size_t(gate_blocks(cell)) * units * units : 0;
  floats += 2 * (two ? 3 : 1) * units;                             // what the workers scale by
  floats += gated ? (two ? 5 : 4) * units : units;                 // what the feeders form the matrix with
  floats += gated ? (units == 64 ? 8 : 4) * size_t(units) : 0;     // their sums
  return tiles * 3 * 2 * units * (units + 8) + 4 * (floats + 12);  // and maxima
}

// `chunks` as block_chunks returned it; there may come out fewer. Workspace and weights are not set.
BlockGeometry block_geometry(const ScanShape& shape, int64_t chunks);
// Whether the device has the shared memory for more than one chunk.
bool block_fits(const ScanShape& shape);
int block_chunks(const ScanShape& shape);
scan::Stages block_stages(const ScanShape& shape, int64_t chunks);
int64_t block_workspace(const ScanShape& shape, int64_t chunks);
void block_chain(const ScanShape& shape, const ScanChain<float>& args, int64_t chunks, cudaStream_t stream);

// The chain of one cell, instantiated in a file of its own, so that they compile side by side.
template <Cell cell>
void cell_block(const ScanShape& shape, const ScanChain<float>& args, BlockGeometry p, cudaStream_t stream);

}  // namespace weft::rnn
