"""Mistakes with scans, by the message: it names what was called, the argument, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from weft.scan import ScanSequential, chain_backward, linear_scan, pointwise_scan

from tests.messages import refused, step, x

A, H0 = torch.rand(5, 2, 4), torch.zeros(2, 4)
J = [torch.zeros(3, 10, 5), torch.zeros(3, 20, 10)]  # transposed, last layer first


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_scan([1.0], A), "^linear_scan: A must be a Tensor, got list"),
        (lambda: linear_scan(0.5, A), "^linear_scan: A must be a Tensor, got float"),
        (
            lambda: linear_scan(A.transpose(0, 1), A),
            r"^linear_scan: A must be .* got .2, 5, 4.; b is \(T, B, H\), time f",
        ),
        (lambda: linear_scan(A, A, H0, batch_first=True), r"^linear_scan: x0 must be \(B, H\).* = .5, 4., got .2, 4."),
        (lambda: linear_scan(A[0], A[0]), r"^linear_scan: b must be \(T, B, H\), got .2, 4.; time is first"),
        (lambda: linear_scan(A.double(), A), "^linear_scan: b must have the dtype of A, Double, got Float"),
        (lambda: linear_scan(A.long(), A.long()), "^linear_scan: A must be float16, .* got Long"),
        (lambda: linear_scan(A, A.to("meta")), "^linear_scan: b must be on the device of A, cpu, got meta"),
        (lambda: linear_scan(A.to_sparse(), A), r"^linear_scan: A is sparse .*A.to_dense\(\)"),
        (lambda: linear_scan(A, A, h0=None), r"^linear_scan\(\) got an unexpected keyword argument 'h0'"),
        (lambda: linear_scan(A, A, None, True), r"^linear_scan\(\) takes from 2 to 3 positional arguments"),
        (lambda: linear_scan(x(4, 2), A, c=x(4, 2)), r"^linear_scan: b must be \(T, B, H, N\) or \(T, B, H, 1\), got"),
        (lambda: linear_scan(A, A, c=[1]), "^linear_scan: c must be a Tensor, got list"),
        (lambda: pointwise_scan(H0, step, A), "^pointwise_scan: step must be callable, got Tensor"),
        (lambda: pointwise_scan(step, 0, A), "^pointwise_scan: init must be a Tensor or a tuple of Tensors, got int"),
        (lambda: pointwise_scan(step, H0.to_sparse(), A), r"^pointwise_scan: init is sparse .*init.to_dense\(\)"),
        (lambda: pointwise_scan(step, H0, (A, A.to_sparse())), r"^pointwise_scan: inputs\[1\] is sparse"),
        (lambda: chain_backward(x(3, 5).to_sparse(), J), r"^chain_backward: grad is sparse .*grad.to_dense\(\)"),
        (lambda: pointwise_scan(step, H0, A[0]), r"^pointwise_scan: inputs must be \(T, 2, 4\), time and the shape of"),
        (
            lambda: pointwise_scan(step, H0, A.transpose(0, 1)),
            r"^pointwise_scan: inputs must be \(T, 2, 4\), .*\(2, 5, 4\)",
        ),
        (
            lambda: pointwise_scan(step, H0, A, 0.5),
            "^pointwise_scan: parameters must be a Tensor or a tuple of Tensors",
        ),
        (
            lambda: pointwise_scan(step, H0, A, x(3)),
            r"^pointwise_scan: parameters must broadcast to .* \(2, 4\), got \(3",
        ),
        (lambda: pointwise_scan(step, H0, ()), "^pointwise_scan: inputs must not be empty"),
        (
            lambda: pointwise_scan(step, H0, (A, A.double())),
            r"^pointwise_scan: inputs\[1\] must be torch.float32, as init",
        ),
        (
            lambda: pointwise_scan(lambda h, x, p: h @ h.mT, H0, A),
            "^pointwise_scan: step may run pointwise operations of",
        ),
        (
            lambda: pointwise_scan(lambda h, x, p: h * x.item(), H0, A),
            "^pointwise_scan: step reads a value.*torch.where",
        ),
        (
            lambda: pointwise_scan(lambda h, x, p: h if x > 0 else x, H0, A),
            "^pointwise_scan: step reads a value.*torch.w",
        ),
        (
            lambda: pointwise_scan(lambda h, x, p: None, H0, A),
            "^pointwise_scan: step must return a tensor.*got NoneType",
        ),
        (lambda: pointwise_scan(lambda h, x, p: (h, x), H0, A), "^pointwise_scan: .* got tuple of Tensor, Tensor$"),
        (
            lambda: pointwise_scan(lambda h, x, p: h.add_(x), H0, A),
            "^pointwise_scan: step may not change what it is given",
        ),
        (
            lambda: pointwise_scan(lambda h, x, p: h * W, H0, A),
            "^pointwise_scan: .* pass it in parameters, or detach it",
        ),
        (
            lambda: pointwise_scan(step, H0, A, algorithm="scan"),
            "^pointwise_scan: algorithm must be one of 'auto', 'walk'",
        ),
        (
            lambda: chain_backward(x(3, 5), J[::-1]),
            r"^chain_backward: jacobians\[0\] does not chain: its last dimension m",
        ),
        (lambda: chain_backward(x(3, 5), [None]), r"^chain_backward: jacobians\[0\] must be a Tensor, got NoneType"),
        (lambda: chain_backward(x(3, 5), 3), "^chain_backward: jacobians must be a list of Tensors, got int"),
        (
            lambda: chain_backward(x(3, 5), J, schedule="x"),
            '^chain_backward: schedule must be "auto", "linear", "blell',
        ),
        (
            lambda: ScanSequential(nn.GRU(4, 4))(x(3, 4)),
            "^ScanSequential: layer 0: no Jacobian is known for GRU; .*regist",
        ),
        (
            lambda: ScanSequential(nn.ReLU(), schedule="x"),
            '^ScanSequential: schedule must be "auto", "linear", "blelloch',
        ),
    ],
)
def test_scans(call, message):
    refused(call, message)


W = torch.ones(4, requires_grad=True)


def test_a_nested_tensor_in_a_scan():
    nested = torch.nested.nested_tensor([x(5, 4), x(3, 4)], layout=torch.jagged)
    refused(lambda: linear_scan(nested, nested), "^linear_scan: A is a NestedTensor, which it does not take")
    refused(lambda: pointwise_scan(step, H0, nested), "^pointwise_scan: inputs is a NestedTensor, which it does not")
    refused(lambda: chain_backward(x(2, 4), [nested]), r"^chain_backward: jacobians\[0\] is a NestedTensor, which it")
