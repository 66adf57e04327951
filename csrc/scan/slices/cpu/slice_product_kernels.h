// The CPU kernels of slice_product, one table per instruction set (common/cpu/kernels.h). No torch header.
//
// A step multiplies what there is by A[t] from the left, in double: H^3 multiply-adds of which every one is of two
// numbers in L1, a vector of columns at a time. That is H times what the scan of the slice does; but a product that is
// zero to every state, of a net that forgets, ends it.
#pragma once
#include "common/cpu/kernels.h"
#include "common/integers.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {

// A product in the making: by rows of whole vectors, column j of which is matrix[i][j] 2^exponents[j].
constexpr int64_t product_row(int64_t H) {
  return ceil_div(H, 8) * 8;
}
constexpr int64_t product_numbers(int64_t H) {
  return ceil_div(H, 4) * 4 * product_row(H);
}

struct SliceProductKernels {
  // Of steps [first, last) of a batch row, of float and of double. `matrix` and two scratch matrices behind it, of
  // product_numbers(H) each, are at multiples of 64 bytes; there are 2 H exponents, the second half scratch.
  void (*steps[2])(const DenseProduct& product, int64_t row, int64_t first, int64_t last, double* matrix,
                   int64_t* exponents);
  // The product of `later` with an earlier one, which it replaces, with scratch as above.
  void (*then)(int64_t H, const double* later, const int64_t* later_exponents, double* matrix, int64_t* exponents);
};

}  // namespace weft::scan

WEFT_CPU_KERNELS(weft::scan::SliceProductKernels, slice_product_kernels)
