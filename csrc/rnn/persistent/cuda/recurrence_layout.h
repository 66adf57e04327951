// How the recurrence kernel (recurrence.jit.cu) lays a problem out on a block: the host that chooses and the kernel
// that runs compute it here. Integers alone.
#pragma once
#include "common/integers.h"
#include "rnn/cells/cells.h"

namespace weft::rnn {

// How elements are stored and multiplied: fp16; bf16; fp32 with products in TF32; fp32 with products of fp32 accuracy
// (three TF32 products of halves of the mantissa, or FMA).
enum class RecurrenceType { kHalf, kBFloat16, kTF32, kFloat };

constexpr int element_bytes(RecurrenceType type) {
  return type == RecurrenceType::kHalf || type == RecurrenceType::kBFloat16 ? 2 : 4;
}

// What a layout follows from: a problem, and the share of a block. Each field is a macro of the kernel.
struct RecurrenceShape {
  Cell cell;
  RecurrenceType type;
  bool backward;
  int hidden;
  int group;     // blocks that run the same sequences of one direction
  int columns;   // these sequences
  int units;     // hidden units of a block
  int warps;     // of a block
  int split;     // warps that share a row of weights, each with its part of the vector
  int cluster;   // blocks that pool their rows; 1 unless through_l2
  int resident;  // blocks of 64 bytes along the vector, of a warp, whose weights are in registers
  bool fma;      // fused multiply-add, one sequence after another, where mma would spend 8 columns on few; fp32 alone
  bool through_l2;  // how the vector is exchanged; else through shared memory
};

// Of mma.sync: rows of a tile, and bytes of a row that one fragment of the weights covers.
constexpr int kTileRows = 16, kFragmentBytes = 64;

struct RecurrenceLayout {
  int per_chunk;      // elements of a lane's 16 bytes
  int gates;          // G
  int saved;          // values of a unit and step that the forward leaves
  int rows_of_unit;   // of a unit in the product
  int values;         // of a unit in the vector
  int padded_hidden;  // H in whole chunks
  int slice;          // of a block in the vector, elements
  int vector;         // elements
  int row_units;      // of the rows that a block multiplies
  int row_warps;      // along the rows
  int blocks;         // of 64 bytes of the vector, of a warp
  int row_tiles;      // of 16 rows, of a warp
  int rows;           // of a block, padded
  int vectors;        // chunks of the vector that a lane multiplies at a time: with mma a lane has one of 8 sequences
  int batch;          // of the blocks, those that are loaded together through L2
  int in_registers;   // of the blocks, those whose weights are in registers
  int pairs;          // (unit, sequence) of a thread
  int sums;           // independent ones, so that products do not wait for each other; with FMA the four of a tile are
  // Rows in shared memory: of the vector, bytes, so that two rows lie in different banks; of partial sums and of those
  // that a block receives from one of its cluster, floats, likewise.
  int pitch, partial_pitch, received_pitch;
  // Where the parts of shared memory begin, behind the weights: results of a step on their way to others, two buffers
  // of the vector, partial sums, received sums (twice all of them), two barriers of 8 bytes.
  int stage, buffers, buffer_bytes, partials, received, barriers, shared_bytes;

  constexpr explicit RecurrenceLayout(const RecurrenceShape& s) {
    const int bytes = element_bytes(s.type);
    per_chunk = 16 / bytes;
    gates = gate_blocks(s.cell);
    saved = saved_blocks(s.cell);
    rows_of_unit = s.backward ? 1 : gates;
    values = s.backward ? gates : 1;
    padded_hidden = int(ceil_div(s.hidden, per_chunk)) * per_chunk;
    slice = s.units * values;
    vector = s.through_l2 ? padded_hidden * values : s.group * slice;
    row_units = s.cluster * s.units;
    row_warps = s.warps / s.split;
    blocks = int(ceil_div(ceil_div(vector * bytes, kFragmentBytes), s.split * s.cluster));
    row_tiles = int(ceil_div(ceil_div(rows_of_unit * row_units, kTileRows), row_warps));
    rows = row_tiles * row_warps * kTileRows;
    vectors = s.fma ? s.columns : int(ceil_div(s.columns, 8));
    const int loads = vectors < 8 ? 8 / vectors : 1;
    batch = loads < blocks ? loads : blocks;
    in_registers = s.resident < blocks ? s.resident : blocks;
    pairs = int(ceil_div(s.units * s.columns, 32 * s.warps));
    sums = s.fma || row_tiles * vectors >= 4 ? 1 : 2;

    const int vector_bytes = blocks * s.split * kFragmentBytes;
    pitch = vector_bytes + (vector_bytes % 128 == 0 ? 64 : 0);
    partial_pitch = rows + 4;
    received_pitch = rows_of_unit * s.units + 4;
    stage = s.warps * (blocks - in_registers) * row_tiles * kTileRows * kFragmentBytes;
    buffers = stage + int(ceil_div(s.columns * slice * bytes, 16)) * 16;
    buffer_bytes = s.through_l2 ? 0 : s.columns * pitch;
    partials = buffers + 2 * buffer_bytes;
    received = partials + s.split * s.columns * partial_pitch * 4;
    barriers = received + (s.cluster > 1 ? 2 * received_pitch * 4 * s.cluster * s.columns : 0);
    shared_bytes = barriers + 16;
  }
};

}  // namespace weft::rnn
