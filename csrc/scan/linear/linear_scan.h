// linear_scan(A, b, x0=None, *, reverse=False, transpose=False, batch_first=False) -> x
//
//   x[t] = A[t] x[t-1] + b[t],  x[-1] = x0        reverse:   x[t] = A[t] x[t+1] + b[t],  x[T] = x0
//                                                 transpose: A[t]^T instead of A[t]
//
// A      (T, B, H, H); (T, H, H) or (T, 1, H, H), shared by the batch; (T, B, H), the diagonal; or (H), (1, B, H) or
//        (1, 1, H), a diagonal that is constant in time. A 3-D A with the shape of b is diagonal, also where B = H.
// b      (T, B, H)
// x0     (B, H), (H) shared by the batch, or none for zeros: A at the first step is then not used
// x      (T, B, H), new and contiguous; aliases nothing
// batch_first: b and x are (B, T, H), A is (B, T, H, H), (1, T, H, H), (B, T, H), (H), (B, 1, H) or (1, 1, H), and so
// are
//        their gradients; read and written where they lie.
// dtypes float16, bfloat16, float32, float64, and where A is diagonal complex64 and complex128; one for all. The state
// is
//        carried in float32 (float64 for float64), complex numbers in pairs of these, and rounded once when it is
//        written; float32 never uses TF32.
//
// T, B and H may be 0. Inputs may have any strides. Deterministic: two runs give the same bits, on the CPU with the
// same number of threads. Rows of the batch are independent: NaN or inf in one touches no other. Wherever the
// sequential recurrence is finite, so is the result. Errors: TypeError for dtypes, ValueError for shapes, RuntimeError
// for devices; each names the argument.
//
// linear_scan_backward(grad, A, x, x0, reverse, transpose, output_mask, batch_first=False) -> (grad_A, grad_b,
// grad_x0), undefined where masked out; x may be none where grad_A is. It is a linear_scan over A shifted by one step
// with both flags flipped, of complex numbers with their conjugates (torch's convention),
//   lambda[t] = A[t+1]^H lambda[t+1] + grad[t]
//   grad_b = lambda,  grad_A[t] = lambda[t] x[t-1]^H,  grad_x0 = A[0]^H lambda[0],
// each summed where the argument is broadcast, in float32 at least. Diagonal gradients are one pass over memory where
// the device has a kernel for it: nothing is kept between lambda and the gradient of A.
// Under create_graph it is made of differentiable ops, so gradients of any order are scans again.
//
// Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020); for the diagonal case also Martin and Cundy, "Parallelizing linear
// recurrent neural nets over sequence length" (ICLR 2018).
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "common/op_handle.h"
#include "common/tensor.h"
#include "scan/linear/linear_scan_args.h"

namespace weft::scan {

// What a state of such elements is carried in.
at::ScalarType state_type(const at::Tensor& t);

// One checked problem of which no size is 0. A is (T, B, H, H) or (T, 1, H, H) or, with `diagonal`, (T, B, H).
struct Problem {
  at::Tensor A, b, x0;  // x0 undefined: zeros
  bool diagonal, reverse, transpose;
};

// A problem as the kernels want it. Tensors whose strides LinearScan cannot express are copied; `problem` keeps the
// copies alive.
struct Described {
  Problem problem;
  LinearScan args;
};
Described describe(Problem problem, const at::Tensor& out);

// The gradients of a diagonal scan, none of whose sizes is 0, in one pass. A is (T, B, H), with stride 0 in t where it
// is constant; what is not wanted is undefined. The outputs have unit stride in h, grad_x0 and a sum are contiguous.
struct DiagonalBackward {
  at::Tensor grad, A, x, x0;
  bool reverse;
  at::Tensor grad_A;   // (T, B, H); (B, H), the sum over T, in the dtype of the state where A is constant
  at::Tensor grad_b;   // (T, B, H)
  at::Tensor grad_x0;  // (B, H), in the dtype of the others or of the state
};
struct DescribedGradients {
  DiagonalBackward problem;
  DiagonalGradients args;
};
DescribedGradients describe(DiagonalBackward problem);

// One scan into `out` (T, B, H), which has unit stride in h and overlaps no input.
void linear_scan_cuda(const Problem& problem, const at::Tensor& out);

// The two operators on either device: checks and allocation around the device's scan. `gradients` may be null: then
// diagonal gradients are a scan and products, as dense ones are.
using ScanInto = void (*)(const Problem&, const at::Tensor&);
using GradientsInto = void (*)(const DiagonalBackward&);
at::Tensor linear_scan_forward(ScanInto scan, const at::Tensor& A, const at::Tensor& b,
                               const std::optional<at::Tensor>& x0, bool reverse, bool transpose, bool batch_first);
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Gradients linear_scan_gradients(ScanInto scan, GradientsInto gradients, const at::Tensor& grad, const at::Tensor& A,
                                const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& x0, bool reverse,
                                bool transpose, std::array<bool, 3> output_mask, bool batch_first);

inline const OpHandle<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, bool, bool,
                                 bool)>
    linear_scan_op("weft::linear_scan");
inline const OpHandle<Gradients(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                const std::optional<at::Tensor>&, bool, bool, std::array<bool, 3>, bool)>
    linear_scan_backward_op("weft::linear_scan_backward");

}  // namespace weft::scan
