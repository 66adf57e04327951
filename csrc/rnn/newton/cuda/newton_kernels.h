// Launchers of the CUDA kernels of algorithm "newton": pointers, sizes and a stream. Torch-free.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "rnn/newton/chunks.h"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {

constexpr int64_t kMostChunks = 1024;

// For H <= kWarpHidden, a warp per chunk and sequence, all of them at once on the device.
struct NewtonWarps {
  TimeChunks chunks;
  uint64_t* messages;   // newton_messages() of them, zeros: what the walkers of a sequence tell each other
  int64_t* statistics;  // (B, 4), zeros, as scan::NewtonRun has them; null where nobody asks
};

// How a call is cut; T and B are at least 1. One chunk is warp_forward's. scalar_bytes: 4 or 8.
TimeChunks newton_chunks(const ScanShape& shape, int scalar_bytes);
int64_t newton_messages(const ScanShape& shape, const TimeChunks& chunks, int scalar_bytes);

// The forward pass in more than one chunk. args.cells is needed of an lstm, whether or not gates are saved; h0 and c0
// may be null for zeros.
void newton_forward(const ScanShape& shape, const WarpForward<float>& args, const NewtonWarps& warps,
                    cudaStream_t stream);
void newton_forward(const ScanShape& shape, const WarpForward<double>& args, const NewtonWarps& warps,
                    cudaStream_t stream);

// Chunks that are rows of a batch, row k B + b chunk k of sequence b, after a round of walks over all of their steps.
template <typename scalar>
struct NewtonSeams {
  TimeChunks chunks;
  int64_t T, B, H, round;
  scalar *end_h, *end_c;      // (chunks * B, H): the states after the chunks' last steps; c null where there is none
  scalar *start_h, *start_c;  // the same: what each began with
  const int* gate;            // where that is 0 the round did nothing; null: it did
  int* next_gate;             // of the next round
  int64_t* statistics;        // as of NewtonWarps
};
void newton_seams(const NewtonSeams<float>& args, cudaStream_t stream);

}  // namespace weft::rnn
