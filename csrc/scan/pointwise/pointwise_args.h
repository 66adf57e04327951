// What the kernels of pointwise_scan are given, on every device. Free of torch, for hosts and kernels.
#pragma once

namespace weft::scan {

constexpr int kMaxPointwiseStates = 8, kMaxPointwiseTensors = 64;

// A tensor (T, N) or (N) whose channel n lies at n / inner * outer + n % inner, in elements; `step` apart in time.
struct PointwiseOperand {
  void* data;
  long long step, outer, inner;
};

// Time is counted in the order of the walk, from 0 to T - 1; with `reverse` step t is at T - 1 - t in memory.
struct PointwiseArgs {
  PointwiseOperand operands[kMaxPointwiseTensors];  // states before the first step, inputs, parameters
  PointwiseOperand grads[kMaxPointwiseStates];      // of the states after every step; read where there is one
  // Gradients: of the states before the first step (N); of the inputs; of the parameters (chunks, N), in acc_t, a sum
  // over each chunk. Written where wanted.
  PointwiseOperand results[kMaxPointwiseTensors];
  void* states[kMaxPointwiseStates];  // (T, N) each, contiguous; written forward, read backward
  long long T, N, chunk;              // steps of a chunk, a multiple of the kernel's batch
  int chunks, reverse;
  // Workspaces of chunks in acc_t, of which there are two that take turns: where each chunk started, where it ended,
  // and the derivative of the end by the start. (2, chunks, states, N), the same, and (2, chunks, states^2, N); the
  // backward pass has one of each and needs no starts.
  void *starts, *ends, *derivatives;
  void* marks;            // half types: states in acc_t at the end of each batch, (batches, states, N)
  unsigned* counters;     // zeros: the barrier, then a flag for each round
  int* fallen;            // backward: zeros (N)
  long long* statistics;  // scan/newton/report.h, zeros (N, 4), or null
};

constexpr int kPointwiseRounds = 8;  // after which the rest is walked
constexpr int kPointwiseCounters = kPointwiseRounds + 4;

}  // namespace weft::scan
