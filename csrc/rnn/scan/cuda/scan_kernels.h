// Launchers of the CUDA kernels of backward="scan": pointers, sizes and a stream. Torch-free.
//
// Every array is contiguous, in the accumulate type (float or double). Steps are counted in processing order s =
// 0..T-1; the row of step s and batch b is t(s) * B + b with t(s) = s, or T-1-s where `reverse`.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "rnn/cells/cells.h"
#include "rnn/scan/limits.h"
#include "scan/linear/cuda/linear_scan.h"
#include "scan/linear/stages.h"
#include "scan/slices/slice_args.h"

namespace weft::rnn {

struct ScanShape {
  Cell cell;
  int64_t T, B;
  int H;
  bool reverse;
};

template <typename scalar>
struct WarpForward {
  const scalar* projected;  // (T, B, G H): W_ih x + b_ih; null where x is one number, of which the kernel makes it:
  const scalar* x;          // (T, B)
  const scalar* w_ih;       // (G H, 1)
  const scalar* b_ih;       // (G H), or null
  const scalar* w_hh;       // (G H, H)
  const scalar* b_hh;       // (G H), or null
  const scalar* h0;         // (B, H)
  const scalar* c0;         // (B, H), lstm only
  scalar* output;           // (T, B, H)
  scalar* h_n;              // (B, H)
  scalar* c_n;              // (B, H), lstm only
  scalar* gates;            // (T, B, 4 H), or null to save nothing
  scalar* cells;            // (T, B, H), lstm only, or null
};

template <typename scalar>
struct ScanChain {
  const scalar* grad_output;  // (T, B, H), or null for zeros
  const scalar* grad_h_n;     // (B, H), or null for zeros
  const scalar* grad_c_n;     // (B, H), or null for zeros
  const scalar* w_hh;         // (G H, H)
  const scalar* h0;           // (B, H)
  const scalar* c0;           // (B, H), lstm only
  const scalar* output;       // (T, B, H)
  const scalar* gates;        // (T, B, 4 H)
  const scalar* cells;        // (T, B, H), lstm only
  scalar* dgates;             // (T, B, K H), K = chain_blocks(cell)
  scalar* grad_h0;            // (B, H)
  scalar* grad_c0;            // (B, H), lstm only
  void* workspace;            // scan_chain_workspace() bytes, 16-byte aligned
};

// dW = [h_prev | x | 1]^T dgates, all parameters in one pass over the rows, and grad_input = dgates' first G H columns
// times W_ih, for I small. Any gradient may be null, and what only it needs.
template <typename scalar>
struct ScanGradients {
  int I;
  const scalar* dgates;  // (T, B, K H)
  const scalar* h0;      // (B, H)
  const scalar* output;  // (T, B, H)
  const scalar* input;   // (T, B, I), for grad_w_ih
  const scalar* w_ih;    // (G H, I), for grad_input
  scalar* grad_input;    // (T, B, I)
  scalar* grad_w_ih;     // (G H, I)
  scalar* grad_w_hh;     // (G H, H)
  scalar* grad_b_ih;     // (G H)
  scalar* grad_b_hh;     // (G H)
  void* workspace;       // scan_gradients_workspace() bytes
};

// For H <= kWarpHidden.
void warp_forward(const ScanShape& shape, const WarpForward<float>& args, cudaStream_t stream);
void warp_forward(const ScanShape& shape, const WarpForward<double>& args, cudaStream_t stream);

// Beyond, where the gates are recovered from the output: `gates` (T, B, 4 H) from what enters the nonlinearities to
// what comes out of them. An lstm's four blocks are sums of both sides; a gru's r and z are, n holds the input's side
// alone and m is as it stays. `entering` (T, B, H), lstm only: i g, what enters the cells.
void scan_gates(const ScanShape& shape, float* gates, float* entering, cudaStream_t stream);
void scan_gates(const ScanShape& shape, double* gates, double* entering, cudaStream_t stream);

// The number of chunks that a cost model expects to be fastest; 1 is the sequential recurrence. double always runs as
// one, and holds H <= kWarpHidden; float holds scan_max_hidden.
int scan_chunks(const ScanShape& shape);
// The same of a slice whose whole lies on many ranks, H <= kWarpHidden: its first chunk has a map, too.
int scan_slice_chunks(const ScanShape& shape);
scan::Stages scan_stages(const ScanShape& shape, int chunks);
int64_t scan_chain_workspace(const ScanShape& shape, int chunks);
void scan_chain(const ScanShape& shape, const ScanChain<float>& args, int chunks, cudaStream_t stream);
void scan_chain(const ScanShape& shape, const ScanChain<double>& args, int chunks, cudaStream_t stream);

// The chain of a slice whose whole lies on many ranks, H <= kWarpHidden, in two halves with the exchange between them:
// first the maps of its chunks, (chunks, B, scan_slice_floats()) from no gradient of the state that leaves, and what
// the rank tells of them: the gradient of the state that enters, (B, S H), h before c, S states, and the product (B, S
// H, S H) that takes one that leaves there. Then the chain from args.grad_h_n and grad_c_n, by the maps; args.workspace
// is for scan_slice_starts(). T is at least 1; both halves are given the same number of chunks, 1 to T.
int64_t scan_slice_floats(Cell cell, int64_t H);
int64_t scan_slice_starts(const ScanShape& shape, int chunks);  // bytes
void scan_slice_maps(const ScanShape& shape, const ScanChain<float>& args, int chunks, const scan::SliceMaps& told,
                     const scan::Workspace& workspace, cudaStream_t stream);
void scan_slice_replay(const ScanShape& shape, const ScanChain<float>& args, int chunks, const float* maps,
                       cudaStream_t stream);

// For H <= kWarpHidden. Partial sums per slab of rows, added in a fixed order. A gate gradient or a state that
// is inf makes NaN of the sums it enters, whatever the sign of the others. The workspace is for the gradients of the
// parameters, of w_ih's where `inputs` is I and not 0.
int64_t scan_gradients_workspace(const ScanShape& shape, int inputs);
void scan_gradients(const ScanShape& shape, const ScanGradients<float>& args, cudaStream_t stream);

}  // namespace weft::rnn
