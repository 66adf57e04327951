// chain_backward(grad, jacobians, levels=-1) -> gradients
//
// grad       (B, n_0), the gradient of the loss by the chain's output; or (n_0), and nothing has a batch
// jacobians  J_1 .. J_n, transposed, last layer first: J_k is (B, n_k, n_{k-1}) or (n_k, n_{k-1}), shared by the batch
// gradients  n new tensors, g_k = J_k g_{k-1} with g_0 = grad, (B, n_k) or (n_k); n may be 0, as may every size
// levels     0: one product of a matrix and a vector after the other. k > 0: k levels of the up-sweep of the modified
//            Blelloch scan (the operator is A <> B = B A), the nodes that remain one after the other, then the
//            down-sweep, in which every operand is a vector. More levels than the tree has: the whole scan. -1: linear
//            products, as one linear_scan where the Jacobians have one square shape.
// dtypes     float16, bfloat16 (computed in float32, rounded once), float32 (no TF32), float64
//
// Made of differentiable ops: gradients of any order, CPU and CUDA. Nothing waits for the device. Rows of the batch are
// independent. A product of Jacobians can overflow or underflow where the gradients do not, so each of its columns,
// which is one vector carried through the chain, has its own power of two. It can cancel, too, beyond any precision: so
// with k > 0 the products of -1 are computed as well, and a gradient of one row in which the tree differs from them by
// more than a few units in the last place of any element is theirs. Derivatives are always those of the linear
// products. So every schedule has the numbers of `linear` up to rounding, and k > 0 costs more than -1: it is for
// comparison.
//
// Errors: TypeError for dtypes, ValueError for shapes (the Jacobian is named by its position in the list) and levels,
// RuntimeError for devices.
//
// Source: BPPSA, section 3 (Wang, Bai, Pekhimenko, MLSys 2020).
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::scan {

std::vector<at::Tensor> chain_backward(const at::Tensor& grad, at::TensorList jacobians, int64_t levels);

}  // namespace weft::scan
