// What weft::rnn would do on a GPU, for weft.explain and the choice of an algorithm.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rnn/newton/chunks.h"
#include "scan/linear/stages.h"

namespace weft::rnn {

// A layer's call. T or B may be 0 for unknown: only the weights are looked at, and one step is what takes time.
struct RnnCase {
  std::string cell, dtype;  // dtype as torch prints it without "torch."
  int64_t T, B, I, H;
  int layers, directions;
  bool packed, trains;
  int heads = 1;
};

// How the recurrence of one pass is laid out.
struct RnnPass {
  std::string tier, product;       // small, cluster or grid; mma or fma
  int64_t groups;                  // of blocks that share the weights, of all directions
  int blocks, threads, sequences;  // of a group, of a block, of a group
  int cluster;                     // blocks that pool their rows
  int directions;                  // that run at the same time
};

struct RnnReport {
  std::string why_not;                       // empty where the kernel runs
  std::optional<RnnPass> forward, backward;  // nothing for a pass without a kernel
  double microseconds = 0;  // expected, of all layers, with the backward pass if trained; 0: step by step
};

// Compiles the kernels where they are not yet.
RnnReport rnn_report(int device, const RnnCase& layer);

// How backward="newton" cuts a float32 layer above what a warp holds into chunks that are rows of the persistent
// kernel's batch: 1 where that is not expected to be faster.
TimeChunks rnn_row_chunks(int device, const RnnCase& layer);

// Every geometry that fits, the fastest expected first: the text for WEFT_RNN_GEOMETRY, what compiles it, the expected
// microseconds of a step, and how much of what they are made of.
struct RnnGeometry {
  std::string text;
  std::vector<std::string> defines;
  double step_us, launches;
  std::vector<std::pair<std::string, double>> amounts;
};
std::vector<RnnGeometry> rnn_geometries(int device, const RnnCase& layer, bool backward);

// How many chunks the chain of backward="scan" has for one direction in float, and what its stages are expected to
// take.
scan::Expected rnn_scan_expected(int device, const std::string& cell, int hidden, int64_t steps, int64_t batch);
// The same of a slice whose whole lies on many ranks, H <= 32.
int rnn_slice_chunks(int device, const std::string& cell, int hidden, int64_t steps, int64_t batch);
// Floats of its map of a chunk and row of the batch, with the gradient that enters it.
int64_t rnn_slice_floats(const std::string& cell, int64_t hidden);

}  // namespace weft::rnn
