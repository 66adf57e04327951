// A pass of a vertex program over all frontiers in one kernel that a script drives. Source: VPPS (MICRO 2018), sections
// III and IV.
//   WEFT_VERTEX_TYPE      float, of registers; buffers may be narrower
//   WEFT_VERTEX_BUFFERS   how many the program has
//   WEFT_VERTEX_MATRICES  the same, or 1 where it has none
//   WEFT_VERTEX_BLOCKS    of a group
//   WEFT_VERTEX_PRODUCTS  types of the products; csrc/vertex/exec/persistent_source.h
//   WEFT_VERTEX_WEIGHTS   loads what the block keeps of each matrix
//   WEFT_VERTEX_SUMS      bytes for what a pair's product hands to its kernel
//   WEFT_VERTEX_STEPS     the instructions that are steps
//   WEFT_VERTEX_TURN      loads what a part of a training step keeps where there is no room for that of all parts
//   WEFT_VERTEX_HEAD_TURN the block that takes the first of the head's gradients
//
// Decomposition: one block on each multiprocessor, all resident. Neighbouring blocks are a group, which shares one copy
// of the weights and has graphs of its own: every block of a group reads all rows of a product, so what the groups read
// of L2 for a row goes with their blocks, and few rows take the shortest where all blocks are one. A block owns the
// same columns of every kernel and the columns of each matrix that these read (csrc/vertex/program/partition.h). What
// it keeps of the matrices lies in shared memory from the first frontier to the last. Blocks meet only where a step
// reads what others wrote: of a Tree-LSTM once a frontier, forward before the product that reads h, backward before the
// one that reads the gradients of the gates.
//
// Cost of a Tree-LSTM of H 256 on an H200: 1.1 us a frontier of one row forward and 1.5 backward, with one group; both
// passes of 256 trees take 0.6 ms with several. Most of a frontier of few rows is the exchange of what is published: a
// warp that asks before its block has published takes 0.2 to 0.5 us more, and one that waits a little with it, too.
// With one group most of the time of many rows goes into the reads of all rows from L2 by every block.
#include "common/cuda/grid_barrier.jit.cuh"
#include "jit/resident_product.jit.cuh"
#include "vertex/exec/cuda/body.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"

#ifdef WEFT_VERTEX_UPDATES
#include "vertex/exec/cuda/training.jit.cuh"
#endif

namespace {

using weft::DealtColumns;
using weft::FourOf;
using weft::Multiply;
using weft::ResidentProduct;
using weft::vertex::kCounterApart;
using weft::vertex::kPersistentThreads;
using weft::vertex::kScriptWindow;
using weft::vertex::MatrixArgument;
using weft::vertex::PersistentArguments;
using weft::vertex::ScriptInstruction;

constexpr int kBlocks = WEFT_VERTEX_BLOCKS, kWarps = kPersistentThreads / 32;

WEFT_VERTEX_PRODUCTS

// What other blocks wait for.
__device__ __forceinline__ void publish(float& to, float x) {
  weft::store_published(&to, x);
}
template <typename Half>
__device__ __forceinline__ void publish(Half& to, float x) {
  weft::store_published(&to.bits, Half(x).bits);
}

// Rows of `target`, the block's columns, = rows of `source` @ matrix [+ bias].
template <typename Product, typename E>
__device__ __noinline__ void product(const BufferArgument& source, const BufferArgument& target, int first, int count,
                                     int rank, const FourOf<E>* weights, unsigned char* partials, const E* bias) {
  const E* const from = static_cast<const E*>(source.data) + first * source.stride;
  E* const to = static_cast<E*>(target.data) + first * target.stride;
  const long long from_stride = source.stride, to_stride = target.stride;
  Product::run(
      count, rank, weights, reinterpret_cast<float*>(partials), [=](int i) { return from + i * from_stride; },
      [=](int i, int, int column, float sum) {
        if (bias != nullptr) sum += float(bias[column]);
        to[i * to_stride + column] = E(sum);
      });
}

// What a thread has of a pair's kernel: its `pair`-th row, `index` of all, and the block's `local`-th column, j of all.
struct Place {
  int &pair, &local, &j, &index;
};

// Pairs of product kNumber and a kernel of kWidth columns, of which a block has kUnits: the one at `at`, and those that
// follow it in the window, as far as they are of as few rows. These have the weights in registers, and of each the
// indices of its operands are there before its rows. kSameRows: the kernel is of the product's rows; what a thread has
// of them then lies in the warp that adds them up, if the block has no more of the kernel's columns than the product's
// lanes. place.index is that of the first pair alone. asked() asks for a kernel's operands; indices(), of which there
// are those of the next by ahead(row) and then taken(), and early() are the same in two; meanwhile() and late() come
// before and after the sums.
template <typename Product, typename E, int kNumber, int kUnits, int kWidth, bool kSameRows, typename Asked,
          typename Indices, typename Early, typename Ahead, typename Taken, typename Meanwhile, typename Late>
__device__ __forceinline__ void pairs(ScriptInstruction& instruction, const ScriptInstruction* window, int& at,
                                      const BufferArgument& source, const BufferArgument& target, int rank,
                                      const FourOf<E>* weights, unsigned char* partial_bytes, float* sums,
                                      const Place& place, const Asked& asked, const Indices& indices,
                                      const Early& early, const Ahead& ahead, const Taken& taken,
                                      const Meanwhile& meanwhile, const Late& late) {
  static_assert(weft::vertex::kMostPairRows <= 2 * Product::kPartRows, "that many are taken at once");
  float* const partials = reinterpret_cast<float*>(partial_bytes);
  // Both have rows of this program, which are no longer than an int says.
  const int from_stride = int(source.stride), to_stride = int(target.stride);
  const E* rows;
  E* to;
  const auto begin = [&] {
    rows = static_cast<const E*>(source.data) + instruction.first * source.stride;
    to = static_cast<E*>(target.data) + instruction.first * target.stride;
  };
  const auto from = [&](int i) { return rows + i * from_stride; };
  const auto store = [&](int i, int local, int column, float sum) {
    to[i * to_stride + column] = E(sum);
    sums[i * Product::kColumns + local] = float(E(sum));
  };
  // Whether the thread has a column.
  const auto find = [&](int apart) {
    place.pair = threadIdx.x / apart;
    place.local = threadIdx.x % apart;
    place.j = rank * kUnits + place.local;
    return place.local < kUnits && place.j < kWidth;
  };
  // A warp adds up all that the kernel's columns of a row have of the product, if these are no more than it has lanes.
  constexpr bool kInWarps = kSameRows && kUnits <= Product::kRowLanes;
  const bool done = Product::repeated(instruction.count, rank, weights, [&](auto products) {
    constexpr int kApart = kInWarps ? Product::kRowLanes : kUnits;
    const bool has = find(kApart);
    bool mine = has && place.pair < instruction.next_count, is_first = true;
    if (mine) {
      place.index = instruction.next_first + place.pair;
      indices();
    }
    for (;;) {
      begin();
      const unsigned place_of_next = unsigned(at + 1) % kScriptWindow;
      const ScriptInstruction& next = window[place_of_next];
      const bool goes_on = place_of_next != 0 && next.op == ScriptInstruction::kPair && next.step == kNumber &&
                           products.takes(next.count);
      const bool mine_next = goes_on && has && place.pair < next.next_count;
      products.run(
          instruction.count, partials, from, store,
          [&] {
            // What the kernel before wrote is seen by this one, and no warp asks for what other blocks publish
            // before this block has published its own: that cannot be there, and keeps memory from what can.
            if (!is_first) __syncthreads();
            if (mine) early();
            if (mine_next) ahead(next.next_first + place.pair);
          },
          [&] {
            if (mine) meanwhile();
          });
      const bool in_warp = kInWarps
                               ? Product::kRowLanes <= 32
                               : instruction.count * Product::kRowLanes <= 32 && instruction.next_count * kUnits <= 32;
      in_warp ? __syncwarp() : __syncthreads();
      if (mine) late();
      if (!goes_on) return;
      is_first = false;
      ++at;
      instruction = next;
      mine = mine_next;
      if (mine) taken();
    }
  });
  if (done) return;
  begin();
  const bool mine = find(kUnits) && place.pair < instruction.next_count;
  place.index = instruction.next_first + place.pair;
  Product::run_between(
      instruction.count, rank, weights, partials, from, store,
      [&] {
        if (mine) asked();
      },
      [&] {
        if (mine) meanwhile();
      });
  if (mine) late();
}

// Before the first use of what is on its way from the matrices; kernels of leaves run meanwhile.
__device__ __forceinline__ void await_weights(bool& loading) {
  if (!loading) return;
  weft::copy_wait<0>();
  __syncthreads();
  loading = false;
}

template <typename Columns, typename E>
__device__ __noinline__ void zero(const BufferArgument& target, int first, int count, int rank) {
  E* const to = static_cast<E*>(target.data) + first * target.stride;
  for (int i = threadIdx.x; i < count * Columns::count(); i += kPersistentThreads) {
    const int column = Columns::of(i % Columns::count(), rank);
    if (column >= 0) to[i / Columns::count() * target.stride + column] = E(0.0f);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPersistentThreads, 1)
    vertex_persistent(const __grid_constant__ PersistentArguments a,
                      const __grid_constant__ Many<BufferArgument, WEFT_VERTEX_BUFFERS> buffers,
                      const __grid_constant__ Many<MatrixArgument, WEFT_VERTEX_MATRICES> matrices
#ifdef WEFT_VERTEX_UPDATES
                      ,
                      const __grid_constant__ TrainingArguments training,
                      const __grid_constant__ Many<UpdateArgument, WEFT_VERTEX_UPDATES> updates
#endif
    ) {
  unsigned char* const shared = weft::dynamic_shared_memory();
  ScriptInstruction* const window = reinterpret_cast<ScriptInstruction*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + kScriptWindow * sizeof(ScriptInstruction));
  unsigned char* const partials = reinterpret_cast<unsigned char*>(sums) + WEFT_VERTEX_SUMS;
  const FrontierArguments& p = a.frontier;
  const int *vertices = p.vertices, *gather = p.gather, *first_edge = p.first_edge, *edge_children = p.edge_children,
            *edge_parents = p.edge_parents, *first_use = p.first_use, *users = p.users,
            *first_sum_use = p.first_sum_use, *sum_use_edges = p.sum_use_edges;
  const long long num_vertices = p.num_vertices;
  const int group = blockIdx.x / kBlocks, rank = blockIdx.x % kBlocks;
  unsigned* const arrived = a.arrived + (1 + group) * kCounterApart;
  const ScriptInstruction* const script = a.script + group * a.apart;
#ifdef WEFT_VERTEX_UPDATES
  float counted = 0.0f;
  bool refused = false;
  look_at_targets(training, reinterpret_cast<float*>(partials), counted, refused);
#endif
  WEFT_VERTEX_WEIGHTS
  bool loading = true;
  for (int at = 0;; ++at) {
    __syncthreads();  // what the block did is seen by its next instruction
    if (at % kScriptWindow == 0) {
      if (threadIdx.x < kScriptWindow) window[threadIdx.x] = script[at + threadIdx.x];
      __syncthreads();
    }
    ScriptInstruction instruction = window[at % kScriptWindow];
    const int first = instruction.first, count = instruction.count;
    if (instruction.op == ScriptInstruction::kEnd) {
      await_weights(loading);  // nothing may come into the memory of a block that has ended
      return;
    }
    if (instruction.op == ScriptInstruction::kSignal) {
      weft::group_signal(count ? a.arrived : arrived);
      continue;
    }
    if (instruction.op == ScriptInstruction::kWait) {
      weft::group_wait(count ? a.arrived : arrived, unsigned(first) * (count ? gridDim.x : kBlocks));
      continue;
    }
#ifdef WEFT_VERTEX_UPDATES
    const auto &outputs = buffers.of[WEFT_VERTEX_OUTPUT], &output_grads = buffers.of[WEFT_VERTEX_OUTPUT_GRAD];
    if (instruction.op == ScriptInstruction::kLoss) {
      loss(training, outputs, output_grads, counted, refused, reinterpret_cast<float*>(partials));
      continue;
    }
    if (instruction.op == ScriptInstruction::kTurn) {
      await_weights(loading);  // of the part before, which may have had no use
      WEFT_VERTEX_TURN
      loading = true;
      continue;
    }
    if (instruction.op == ScriptInstruction::kUpdateHead) {
      await_weights(loading);
      update_head<WEFT_VERTEX_HEAD_TURN>(training, outputs, counted, refused, updates.of[kUpdates - 2],
                                         updates.of[kUpdates - 1], reinterpret_cast<float*>(partials));
      continue;
    }
#endif
    // Which step, and how.
    switch (instruction.step * 8 + instruction.op) { WEFT_VERTEX_STEPS }
  }
}
