// What a slice of a dense linear_scan does to a state that comes in, but for what it adds: the product of its steps, as
// ranks send it.
//
// slice_product(A, reverse, transpose) -> product
//   A        (T, B, H, H), or (T, 1, H, H), shared by the batch; float32 or float64, on CUDA float32 and H up to
//            32; any strides
//   product  (B, H, H) or (1, H, H), int32, int64 of float64: A[T-1] ... A[0], packed as slice_message packs products;
//            A[0] ... A[T-1] with `reverse`, every A transposed with `transpose`. The identity where T is 0.
//
// Products are carried in double and each column with an exponent of its own, as it says what becomes of one component
// of a state: that a product leaves the range of a state, where the states do not, does no harm. Deterministic, on the
// CPU with the same number of threads; batch rows are independent. No autograd of its own: weft::slice_scan has it.
// Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3, cut by devices.
#pragma once
#include <ATen/core/Tensor.h>

#include "scan/slices/slice_args.h"

namespace weft::scan {

// Writes the packed product, (B, H, H). B and H are not 0.
using ProductInto = void (*)(const DenseProduct& product, const at::Tensor& out);

at::Tensor slice_product(ProductInto run, const at::Tensor& A, bool reverse, bool transpose);

}  // namespace weft::scan
