// What the files of linear_scan_block share: the arguments of its kernels and one entry per element type.
#pragma once
#include "scan/linear/cuda/block_chunks.h"
#include "scan/linear/cuda/linear_scan.h"

namespace weft::scan::block {

constexpr int kMaxStages = 8;

struct Arguments : Chunked {
  const void* A;
  const void* b;
  const void* x0;
  void* out;
  int64_t A_t, A_b, A_ld, b_t, b_b, x0_b, out_t, out_b;  // A_ld: between rows of A as it lies in memory
  int piece;                                             // bytes that divide every address and row of A: 16, 8, 4 or 2
  bool flat;                                             // A[t] is contiguous and 16-byte aligned
  int64_t first;                                         // the first step that reads A: 1 without x0
  int64_t steps;                                         // from `first` on
  bool bulk;                                             // A[t] passes through the copy engine: flat
  int stages;                                            // of the ring that A passes through in replay
  int tile_rows;                                         // rows of A in one stage
};

// What the kernels need to know, `chunks` chosen by the cost model if it is 0. The workspace is not set.
Arguments plan(const LinearScan& scan, int64_t chunks = 0);

// Launch all kernels.
void run_f16(const Arguments& p, bool transposed, cudaStream_t stream);
void run_bf16(const Arguments& p, bool transposed, cudaStream_t stream);
void run_f32(const Arguments& p, bool transposed, cudaStream_t stream);
void run_f64(const Arguments& p, bool transposed, cudaStream_t stream);

}  // namespace weft::scan::block
