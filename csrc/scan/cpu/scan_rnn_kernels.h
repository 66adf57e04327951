// The CPU kernels of weft::scan_rnn, one table per instruction set. No torch header.
//
// Decomposition: each call runs all time steps for rows [b0, b1) of the batch; calls for disjoint rows are independent,
// so threads meet only at the end. Work per step and row: the recurrent product, G*H*H multiply-adds, by a
// register-blocked micro-kernel over packed weights (L1 or L2, streamed once per block of rows), then the
// nonlinearities on the block while it is in L1.
#pragma once
#include <cstdint>

#include "scan/cell.h"

namespace weft::cpu {

// Weights and biases are packed by the table's own functions, into memory aligned to 64 bytes; everything else is
// contiguous in the layout of scan_rnn.h.
template <typename T>
struct ScanRnnForwardArgs {
  Cell cell;
  bool reverse;
  int64_t steps, B, I, H;
  const T *input, *h0, *c0;
  const T *w_ih, *w_hh;  // packed by pack_forward
  const T* bias;         // padded by pad_bias: what the input side adds
  const T* bias_m;       // padded by pad_bias: gru's b_hn, which r multiplies
  T *output, *h_n, *c_n;
  T *gates, *cells;  // null without save
};

template <typename T>
struct ScanRnnBackwardArgs {
  Cell cell;
  bool reverse;
  int64_t steps, B, H;
  const T *grad_output, *grad_h_n, *grad_c_n;  // null means zeros
  const T *h0, *c0, *output, *gates, *cells;
  const T* w_hh;         // packed by pack_backward
  T* dgates;             // (T,B,K*H)
  T *grad_h0, *grad_c0;  // (B,H)
};

template <typename T>
struct ScanRnnKernels {
  // Elements of a packed matrix that multiplies a vector of `depth` to give `blocks` blocks of H.
  int64_t (*packed_size)(int blocks, int64_t H, int64_t depth);
  void (*pack_forward)(Cell cell, const T* w, int64_t H, int64_t depth, T* packed);  // w (G*H, depth)
  void (*pack_backward)(const T* w, int64_t H, int64_t depth, T* packed);            // w (depth, H)
  void (*pad_bias)(int blocks, const T* bias, int64_t H, T* padded);                 // bias (blocks*H) or null: zeros
  // Elements of scratch memory, aligned to 64 bytes, that one call on `rows` rows of the batch needs.
  int64_t (*forward_scratch)(const ScanRnnForwardArgs<T>& args, int64_t rows);
  int64_t (*backward_scratch)(const ScanRnnBackwardArgs<T>& args, int64_t rows);
  void (*forward)(const ScanRnnForwardArgs<T>& args, int64_t b0, int64_t b1, T* scratch);
  void (*backward)(const ScanRnnBackwardArgs<T>& args, int64_t b0, int64_t b1, T* scratch);
};

// One source, scan_rnn_kernels-inl.h, compiled three times. The AVX2 and AVX-512 tables exist on x86-64 only.
struct ScanRnnTables {
  ScanRnnKernels<float> f32;
  ScanRnnKernels<double> f64;
};
const ScanRnnTables& scan_rnn_baseline();
const ScanRnnTables& scan_rnn_avx2();
const ScanRnnTables& scan_rnn_avx512();

}  // namespace weft::cpu
