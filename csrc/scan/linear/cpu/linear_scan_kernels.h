// The CPU kernels of linear_scan, one table per instruction set (common/cpu/kernels.h): sequential in t, vectorised
// within a step. No torch header.
//
// A step reads A[t] once and does two operations per element, so from main memory it is bound by that read; from cache
// by the product, for which the loops keep several independent sums. The state stays in a buffer in L1 and, for fp16
// and bf16, in fp32.
//
// Diagonal: three streams, and five for the gradients, whose products with x are made while lambda is in a register.
// Where threads share rows, parts of 2 KB follow each other at 4 KB or more, and what bounds a thread is how early they
// are asked for: two steps ahead takes four tenths of the time off the forward pass in bf16 and a third in fp32; whole
// rows in order are as fast without, or faster. How bf16 is converted hardly shows then, but is a third of the time
// where all lies in cache.
// For few channels T can be cut: the totals of all chunks at once, the starts of the chunks one after the other
// (linear_scan.cpp), then all chunks at once, each from its start. Not for doubles.
#pragma once
#include "common/cpu/kernels.h"
#include "scan/linear/linear_scan_args.h"

namespace weft::scan {

// Steps [first, last) of the channels [begin, end) of a batch row.
struct Part {
  int64_t row, begin, end, first, last;
};

// What the steps of a part make of a state x: product x + offset. With each a bound of the numbers it came from:
// |product| as it would be had it never been below 2^-900, and offset had every term been positive. Of every channel of
// the problem, (B, H).
struct Totals {
  double *product, *product_bound, *offset, *offset_bound;
};

constexpr int kChunkedTypes = 3;

struct LinearScanKernels {
  // Of each DType; the first two not for complex numbers. Bytes of scratch for so many batch rows, and all steps of
  // batch rows [row0, row1).
  int64_t (*scratch_bytes[4])(const LinearScan& scan, int64_t rows);
  void (*dense[4])(const LinearScan& scan, int64_t row0, int64_t row1, void* scratch);
  // A part. Its channels' states, fp32 or for doubles fp64, are read from `state` unless the part begins at step 0, and
  // left there; null where nobody asks. Complex numbers have one part in time.
  void (*diagonal[6])(const LinearScan& scan, const Part& part, void* state);
  // The same of lambda, with its gradients; `sums`, in fp64 or pairs of it, is given what the part adds to a summed
  // gradient of A.
  void (*gradients[6])(const DiagonalGradients& problem, const Part& part, void* state, double* sums);
  // Of the first kChunkedTypes.
  void (*totals[3])(const LinearScan& scan, const Part& part, const Totals& totals);
};

}  // namespace weft::scan

WEFT_CPU_KERNELS(weft::scan::LinearScanKernels, linear_scan_kernels)
