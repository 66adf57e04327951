// CPU kernels of csr_matmul and csr_mm over rows, one table per instruction set (common/cpu/kernels.h). No torch
// header. fp16 and bf16 are summed in fp32; sums have an order that is the same for every number of threads.
#pragma once
#include "common/cpu/kernels.h"
#include "sparse/csr_mm_args.h"

namespace weft::sparse {

constexpr int64_t kTile = 16;  // samples whose vectors lie side by side

struct RowKernels {
  // Of each DType. out[t] = sum over k < terms of factors[k] y[starts[k] + t], t < n; factors as they are summed.
  void (*combine[4])(const void* y, const int64_t* starts, const void* factors, int64_t terms, int64_t n, void* out);
  // Of 32-bit and of 64-bit indices, of each DType. Rows [begin, end) of J x: of one sample ...
  void (*vector[2][4])(const CsrMm& p, const void* values, const void* x, void* out, int64_t begin, int64_t end);
  // ... and of `count` samples, at most kTile: element j of sample s is packed[j * kTile + s], its row i out[s * rows +
  // i].
  void (*tile[2][4])(const CsrMm& p, const void* packed, void* out, int64_t count, int64_t begin, int64_t end);
};

}  // namespace weft::sparse

WEFT_CPU_KERNELS(weft::sparse::RowKernels, row_kernels)
