// The CPU kernels of linear_scan_readout, one table per instruction set (common/cpu/kernels.h). No torch header.
//
// A thread takes some adjacent channels of one row through all steps, their states in L1; the loops over n are the
// compiler's to vectorise. Half types are widened to float a row of n at a time. Gradients make the states of a segment
// anew from the one that was kept, as on CUDA.
#pragma once
#include "common/cpu/kernels.h"
#include "scan/readout/readout_args.h"

namespace weft::scan {

// Channels that a thread takes at once: some lines of what has no n.
constexpr int64_t kReadOutBlock = 16;

struct ReadOutKernels {
  // Of each DType. Bytes of scratch, and all steps of the channels [begin, end) of a row, at most kReadOutBlock.
  int64_t (*scratch_bytes[6])(const ReadOut& problem);
  void (*forward[6])(const ReadOut& problem, int64_t row, int64_t begin, int64_t end, void* scratch);
  void (*gradients[6])(const ReadOutGradients& problem, int64_t row, int64_t begin, int64_t end, void* scratch);
};

}  // namespace weft::scan

WEFT_CPU_KERNELS(weft::scan::ReadOutKernels, linear_scan_readout_kernels)
