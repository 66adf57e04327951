// Who does what in a group of blocks that run a pass together (VPPS, MICRO 2018, section III): a block owns the same
// columns of every kernel, and of every matrix the columns that make what its kernels read. So most of what a step
// reads its own block has written, and only what crosses from block to block needs a signal and a wait. Free of torch
// and CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "vertex/program/program.h"

namespace weft::vertex {

// Neighbouring columns, of which block b has those from first + b * units() on, as many as there are.
struct Segment {
  int32_t first, width;
  int32_t units(int32_t blocks) const { return (width + blocks - 1) / blocks; }
};

// What a step reads and other blocks may have written in this pass.
struct CrossRead {
  int32_t buffer;
  bool published;  // it can wait for the values themselves
  bool own;        // in the rows of its task, too, where an earlier step of the same task may have written it
};

// What a script runs: the frontiers of one pass, or a whole training step, from linear layers to gradients.
enum class Pass : int32_t { kForward, kBackward, kTraining };
constexpr int kPasses = 3;

// One step of a pass.
struct Share {
  bool runs = false;
  bool by_rows = false;                   // its rows go round the blocks, each of which takes all columns
  std::vector<Segment> segments;          // else: the columns of a kernel, or of a product's target
  int32_t columns = 0;                    // of a block: of all segments
  std::vector<CrossRead> reads;           // what makes it wait
  std::vector<int32_t> stores, scatters;  // buffers that it writes in its own rows, and in those of later tasks
};

struct Partition {
  Pass pass;
  std::vector<const Step*> steps;          // of the forward pass, then of the backward pass
  size_t forward_steps = 0;                // so many are of the forward pass
  std::vector<char> inner_only, of_edges;  // by step: rows of its operands, where it runs once for all
  int32_t blocks;                          // of a group
  std::vector<Share> shares;               // by step
  // By buffer: products wait for its values instead of a signal, where every one of them is written. Those of slots
  // are so where no vertex with children lacks one, or where the kernels of `blanks` write zeros in their place.
  std::vector<char> published;
  bool published_by_slots = false;  // one of them is
  std::vector<int32_t> blanks;      // steps
};

// The widest kernel decides how many of at most `most` blocks have columns. Made once, and lives with the program.
const Partition& partition_of(const Program& program, Pass pass, int32_t most);

// What is made once for a program, and by a device for it.
struct Partitions {
  std::mutex mutex;
  std::map<std::array<int64_t, 2>, std::unique_ptr<const Partition>> of;  // by pass and the most blocks
  std::map<std::array<int64_t, 4>, std::shared_ptr<void>> kernels;
};

// Whether the step's instruction gives what later products wait for in the rows of parents.
bool gives_published(const Partition& partition, const Instruction& i);

// Whether both are gradients of the same matrix or vector: that is then the sum of both.
bool is_same_gradient(const Step& a, const Step& b);

// Why no script can be made for the program; empty where one can.
std::string script_obstacle(const Program& program);

}  // namespace weft::vertex
