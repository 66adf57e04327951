// The CPU kernels of weft::rnn, one table per instruction set (common/cpu/kernels.h). No torch header.
//
// Decomposition. One team of threads runs the whole op in one parallel region. A direction, and each head of several,
// is a recurrence of its own, whose threads form a grid of batch groups times slices of the hidden units; as many as
// divide the threads run side by side. Batch groups are independent of each other. The slices of a group hand each
// other the state (forward) or the gate gradients (backward) once per step, where they meet (cpu/meeting.h): they are
// for batches with few sequences per thread, and for weights that outgrow a thread's share of the cache bandwidth.
// Elsewhere groups are as fast, and a thread that loses its processor does not hold up others; in a group the others
// soon go on without it.
//
// Where things live. Weights are packed once per call, panel by panel. A slice's recurrent weights stay in the L2 cache
// of its thread, or stream from L3; the state and the gates of a register block are in L1. The input projection runs
// over a chunk of steps at a time: its result is still in L2 when the steps read it, and no (R, G*H) matrix goes
// through memory.
//
// Work per step and thread: rows * panels * G * H vector multiply-adds in register blocks of up to 8 rows by 3 vectors,
// for which a row of weights is loaded once per block, then the nonlinearities of the block. A block of a single vector
// or row sums in several chains, because one chain would wait for the latency of each multiply-add. The gradients of
// input and weights are products over all steps behind the recurrence.
//
// Floor: multiply-adds over the peak of the vector units, 1.2 GFLOP for forward and backward of a GRU with H = I = 128,
// B = 8, T = 256, and 77 GFLOP with H = I = 512, B = 32. On two Zen 5 cores with a peak of 456 GFLOP/s these kernels
// reach 290 and 335. What keeps them from it: loads of weights from L2 beside few rows, the nonlinearities, and first
// touches of fresh memory. A call of a BLAS at each step would pack the same weights each time.
#pragma once
#include <cstdint>

#include "common/cpu/kernels.h"
#include "rnn/cells/cell.h"
#include "rnn/persistent/cpu/meeting.h"

namespace weft::rnn {

// What all members know about a recurrence: one head of a direction, of H units of the layer's `all`. Pointers are to
// the head's first unit; gates, weights' blocks and states of `all` units lie side by side. offsets as in RnnSteps;
// rows of output lie `stride` apart, those of cells kept_states times as far.
struct RnnSequence {
  Cell cell;
  bool reverse, packed;
  int64_t steps, B, I, H, all, stride;
  const int64_t* offsets;
  // Sequences of batch group [b0, b1) that run at step t.
  int64_t running(int64_t t, int64_t b0, int64_t b1) const {
    const int64_t count = offsets[t + 1] - offsets[t];
    return count <= b0 ? 0 : count < b1 ? count - b0 : b1 - b0;
  }
};

// What one thread runs at a time: sequences [b0, b1), hidden units of the panels [p0, p1). A panel is one vector wide.
struct RnnPart {
  int64_t b0, b1, p0, p1;
};

// The slices of a batch group, at most kSlices, and who runs them. Each part has scratch of its own, which holds what
// it carries from step to step, so that any member may go on with it.
constexpr int kSlices = 16;
template <typename T>
struct RnnGroup {
  const RnnPart* parts;
  T* scratch[kSlices];
  Crew crew;
};

// Depth of a block of packed input weights: a group of panels of it stays in L2.
constexpr int64_t kDepthBlock = 512;

// Null pointers: states are zero, results are not wanted.
template <typename T>
struct RnnForwardArgs {
  RnnSequence sequence;
  const T *input, *h0, *c0;
  const T *w_ih, *w_hh;  // packed for the slices
  const T *b_ih, *b_hh;
  T *output, *h_n, *c_n, *gates, *cells;
};

template <typename T>
struct RnnBackwardArgs {
  RnnSequence sequence;
  const T *grad_output, *grad_h_n, *grad_c_n, *grad_cells;
  const T *h0, *c0, *output, *gates, *cells;
  const T* w_hh;  // packed for the slices
  T* dgates;      // (R, dgates_stride): chain blocks of H, where a gate's sides stay apart its input side's first, so
                  // that both sides' columns are contiguous
  int64_t d_stride;  // elements between its rows
  T *grad_h0, *grad_c0;
};

// A (depth, blocks * columns) matrix to pack, element (k, column j of block b) at data[k'' * depth_stride + (b * apart
// + j) * column_stride] with k' = (k + rotate) % depth and k'' = k' / run * run_apart + k' % run; one of the strides is
// 1, with k'' = k if it is depth_stride. Packed: [slice][depth block][group of panels][k][panel][block][lane], zero
// beyond columns.
template <typename T>
struct PackArgs {
  const T* data;
  int64_t depth, depth_stride, column_stride, rotate;
  int64_t run, run_apart;
  int64_t depth_block;
  int blocks;
  int64_t columns, apart;
  int slices;
  T* packed;
};

// out (rows, N) [+]= left (rows, depth) times a matrix packed with blocks = slices = 1.
template <typename T>
struct MultiplyArgs {
  const T* left;
  int64_t left_stride, depth, depth_block;
  const T* packed;
  T* out;
  int64_t columns;
  bool add;
};

// out (.., N) = left (rows, M)^T right (rows, N), column j of left giving row j' / run * run_apart + j' % run of out
// with j' = (j + rotate) % M, where run divides rotate and M; sums = the sums of left's columns in the same order. Rows
// of right lie at right_rows[k], null for zeros, or at right + k * right_stride.
template <typename T>
struct TransposedArgs {
  const T* left;
  int64_t left_stride, rows, M, rotate, run, run_apart;
  const T* right;
  const T* const* right_rows;
  int64_t right_stride, N;
  T *out, *sums;  // each may be null
};

template <typename T>
struct RnnKernels {
  int64_t lanes;
  int64_t (*packed_size)(const PackArgs<T>& args);
  void (*pack)(const PackArgs<T>& args, int member, int members);  // a member's share
  int64_t (*forward_scratch)(const RnnForwardArgs<T>& args, const RnnPart& part);
  int64_t (*backward_scratch)(const RnnBackwardArgs<T>& args, const RnnPart& part);
  // state: (2, B, state_stride) shared by the members of a direction.
  int64_t (*state_stride)(int64_t H);
  void (*forward_begin)(const RnnForwardArgs<T>& args, const RnnPart& part, T* state);  // before a barrier of all
  void (*forward)(const RnnForwardArgs<T>& args, const RnnGroup<T>& group, T* state);
  void (*backward)(const RnnBackwardArgs<T>& args, const RnnGroup<T>& group);
  void (*multiply)(const MultiplyArgs<T>& args, int64_t row0, int64_t row1);
  int64_t (*transposed_scratch)();
  void (*transposed)(const TransposedArgs<T>& args, int task, int tasks, T* scratch);  // a part of out
};

struct RnnTables {
  RnnKernels<float> f32;
  RnnKernels<double> f64;
};

}  // namespace weft::rnn

WEFT_CPU_KERNELS(weft::rnn::RnnTables, rnn_kernels)
