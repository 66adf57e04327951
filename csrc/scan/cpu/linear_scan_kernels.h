// The CPU kernels of linear_scan, one table per instruction set (common/cpu/kernels.h): sequential in t, vectorised
// within a step. No torch header.
//
// A step reads A[t] once and does two operations per element, so from main memory it is bound by that read; from cache
// by the product, for which the loops keep several independent sums. The state stays in a buffer in L1 and, for fp16
// and bf16, in fp32.
#pragma once
#include "common/cpu/kernels.h"
#include "scan/linear_scan_args.h"

namespace weft::scan {

struct LinearScanKernels {
  // Of each DType. Bytes of scratch for so many batch rows, and all steps of batch rows [row0, row1).
  int64_t (*scratch_bytes[4])(const LinearScan& scan, int64_t rows);
  void (*dense[4])(const LinearScan& scan, int64_t row0, int64_t row1, void* scratch);
  // All steps of a batch row's channels [begin, end).
  void (*diagonal[4])(const LinearScan& scan, int64_t row, int64_t begin, int64_t end);
};

}  // namespace weft::scan

WEFT_CPU_KERNELS(weft::scan::LinearScanKernels, linear_scan_kernels)
