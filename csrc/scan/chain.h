// chain_backward(grad, jacobians, levels=-1) -> gradients
//
// grad       (B, n_0), the gradient of the loss by the chain's output
// jacobians  J_1 .. J_n, transposed, last layer first: J_k is (B, n_k, n_{k-1}) or (n_k, n_{k-1}), shared by the batch
// gradients  n new tensors, g_k = J_k g_{k-1} with g_0 = grad, (B, n_k); n may be 0, as may every size
// levels     0: one product of a matrix and a vector after the other. k > 0: k levels of the up-sweep of the modified
//            Blelloch scan (the operator is A <> B = B A), the nodes that remain one after the other, then the
//            down-sweep, in which every operand is a vector. More levels than the tree has: the whole scan. -1:
//            whatever is fastest here.
// dtypes     float16, bfloat16 (computed in float32, rounded once), float32 (no TF32), float64
//
// Made of differentiable ops: gradients of any order, CPU and CUDA. Nothing waits for the device. Rows of the batch are
// independent. A product of Jacobians can overflow or underflow where the gradients do not, so each of its columns,
// which is one vector carried through the chain, has its own power of two: where `linear` is finite, so is every
// schedule. Errors: TypeError for dtypes, ValueError for shapes (the Jacobian is named by its position in the list) and
// levels, RuntimeError for devices.
//
// Source: BPPSA, section 3 (Wang, Bai, Pekhimenko, MLSys 2020).
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::scan {

std::vector<at::Tensor> chain_backward(const at::Tensor& grad, at::TensorList jacobians, int64_t levels);

}  // namespace weft::scan
