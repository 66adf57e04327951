"""Rules of linear_scan, linear_scan_readout, chain_backward and pointwise_scan: fake tensors, vmap, autocast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.rules import LIBRARY, check_devices, one_by_one, widest
from .._base.torch_private import below_autocast
from .halves import slice_map_floats


def _may_be_equal(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are equal, or cannot be told apart because a size depends on data."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # slow to import

    return len(shape) == len(other) and all(guard_or_true(m == n) for m, n in zip(shape, other, strict=True))


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _check_linear_scan(A: Tensor, b: Tensor, x0: Tensor | None, batch_first: bool = False) -> None:
    """The checks of csrc/scan/linear/linear_scan.cpp, on sizes that may be symbols."""
    torch._check_type(
        A.dtype in _DTYPES,
        lambda: f"linear_scan: A must be float16, bfloat16, float32, float64, complex64 or complex128, got {A.dtype}",
    )
    torch._check_type(b.dtype == A.dtype, lambda: f"linear_scan: b must have the dtype of A, {A.dtype}, got {b.dtype}")
    torch._check_type(
        x0 is None or x0.dtype == A.dtype,
        lambda: f"linear_scan: x0 must have the dtype of A, {A.dtype}, got {x0.dtype}",
    )
    check_devices("linear_scan", A=A, b=b, x0=x0)
    order, first = ("(B, T, H)", "batch") if batch_first else ("(T, B, H)", "time")
    torch._check_value(b.dim() == 3, lambda: f"linear_scan: b must be {order}, got {tuple(b.shape)}; {first} is first")
    T, B, H = (b.shape[1], b.shape[0], b.shape[2]) if batch_first else b.shape
    torch._check_value(
        x0 is None or any(_may_be_equal(x0.shape, shape) for shape in ((B, H), (H,))),
        lambda: (
            f"linear_scan: x0 must be (B, H), or (H) shared by the batch, = {(B, H)}, got {tuple(x0.shape)}; b is "
            f"{order}, {first} first"
        ),
    )
    diagonal = ((T, B, H), (H,), (1, B, H), (1, 1, H))
    dense = ((T, B, H, H), (T, 1, H, H), (T, H, H))
    if batch_first:
        diagonal, dense = ((B, T, H), (H,), (B, 1, H), (1, 1, H)), ((B, T, H, H), (1, T, H, H))
    wanted = (
        f"(B, T, H, H) = {(B, T, H, H)}, (1, T, H, H) shared by the batch, (B, T, H) diagonal, or (H), (B, 1, H) or "
        "(1, 1, H)"
        if batch_first
        else f"(T, B, H, H) = {(T, B, H, H)}, (T, H, H) or (T, 1, H, H) shared by the batch, (T, B, H) diagonal, or "
        "(H), (1, B, H) or (1, 1, H)"
    )
    torch._check_value(
        any(_may_be_equal(A.shape, shape) for shape in diagonal + dense),
        lambda: (
            f"linear_scan: A must be {wanted} diagonal and constant in time, to go with b {tuple(b.shape)}; got "
            f"{tuple(A.shape)}; b is {order}, {first} first"
        ),
    )
    torch._check_type(
        not A.dtype.is_complex or any(_may_be_equal(A.shape, shape) for shape in diagonal),
        lambda: f"linear_scan: A must be diagonal where it is complex, got {A.dtype} of {tuple(A.shape)}",
    )


@torch.library.register_fake("weft::linear_scan")
def _linear_scan_fake(
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    transpose: bool = False,
    batch_first: bool = False,
) -> Tensor:
    _check_linear_scan(A, b, x0, batch_first)
    return b.new_empty(b.shape)


@torch.library.register_fake("weft::slice_product")
def _slice_product_fake(A: Tensor, reverse: bool, transpose: bool) -> Tensor:
    return A.new_empty(A.shape[1:], dtype=torch.int64 if A.dtype == torch.float64 else torch.int32)


@torch.library.register_fake("weft::slice_message")
def _slice_message_fake(A: Tensor, value: Tensor, leaves: bool) -> Tensor:
    dtype = torch.int64 if A.dtype == torch.float64 else torch.int32
    return A.new_empty(2 * value.numel() + 1, dtype=dtype)


@torch.library.register_fake("weft::slice_maps")
def _slice_maps_fake(
    A: Tensor, b: Tensor, x0: Tensor | None, chunks: int, reverse: bool, transpose: bool, told: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _, B, H = b.shape
    floats = slice_map_floats(b.device, H)
    message = A.size(1) * H * H + B * H + 1 if told else 0
    return b.new_empty(chunks, B, floats), b.new_empty(B, H), b.new_empty(message, dtype=torch.int32)


@torch.library.register_fake("weft::slice_replay_")
def _slice_replay_fake(
    x: Tensor, A: Tensor, b: Tensor, maps: Tensor, state: Tensor, came: Tensor | None, chunks: int, reverse: bool,
    transpose: bool,
) -> None:  # fmt: skip
    return None


@torch.library.register_fake("weft::slice_states")
def _slice_states_fake(
    messages: Tensor, value: Tensor, order: int, reverse: bool, matrices: int = 0, shares: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H = value.shape
    shape = (matrices, H, H) if matrices else (B, H)
    products = value.new_empty(messages.size(0), *shape, dtype=torch.float64)
    return value.new_empty(value.shape), value.new_empty(value.shape), products, value.new_empty(1, dtype=torch.int32)


@torch.library.register_fake("weft::slice_left")
def _slice_left_fake(messages: Tensor, products: Tensor, order: int, reverse: bool) -> Tensor:
    return messages.new_empty(messages.shape[-2:])


@torch.library.register_fake("weft::slice_mend_")
def _slice_mend_fake(x: Tensor, A: Tensor, state: Tensor, came: Tensor | None, reverse: bool) -> None:
    return None


@torch.library.register_fake("weft::slice_mend_gradients_")
def _slice_mend_gradients_fake(
    grad_b: Tensor, grad_A: Tensor | None, A: Tensor, x: Tensor | None, first: Tensor | None, state: Tensor,
    reverse: bool,
) -> None:  # fmt: skip
    return None


@torch.library.register_fake("weft::slice_begin")
def _slice_begin_fake(A: Tensor, b: Tensor, x0: Tensor | None, first: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(b, memory_format=torch.contiguous_format), _slice_message_fake(A, b[0], True)


@torch.library.register_fake("weft::slice_finish_")
def _slice_finish_fake(
    x: Tensor, A: Tensor, messages: Tensor, order: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _slice_states_fake(messages, x[0], order, reverse)[:3]


@torch.library.register_fake("weft::slice_begin_gradients")
def _slice_begin_gradients_fake(
    grad: Tensor, grad_entered: Tensor | None, grad_end: Tensor | None, A: Tensor, x: Tensor, start: Tensor | None,
    first: bool, reverse: bool, of_A: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_b = torch.empty_like(grad, memory_format=torch.contiguous_format)
    rows = 1 if grad_end is None else 2
    return torch.empty_like(grad_b) if of_A else grad.new_empty(0), grad_b, grad.new_empty(rows, *grad.shape[1:])


@torch.library.register_fake("weft::slice_finish_gradients_")
def _slice_finish_gradients_fake(
    grad_b: Tensor, grad_A: Tensor | None, A: Tensor, x: Tensor, start: Tensor | None, messages: Tensor,
    products: Tensor, order: int, reverse: bool,
) -> Tensor:  # fmt: skip
    return messages.new_empty(messages.shape[-2:])


@torch.library.register_fake("weft::linear_scan_backward")
def _linear_scan_backward_fake(
    grad: Tensor,
    A: Tensor,
    x: Tensor | None,
    x0: Tensor | None,
    reverse: bool,
    transpose: bool,
    output_mask: list[bool],
    batch_first: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _check_linear_scan(A, grad, x0, batch_first)
    check_devices("linear_scan_backward", A=A, x=x)
    torch._check_value(
        x is None or _may_be_equal(x.shape, grad.shape),
        lambda: (
            f"linear_scan_backward: x must be {'(B, T, H)' if batch_first else '(T, B, H)'} = {tuple(grad.shape)}, "
            f"got {tuple(x.shape)}"
        ),
    )
    return (
        A.new_empty(A.shape) if output_mask[0] else None,
        grad.new_empty(grad.shape) if output_mask[1] else None,
        x0.new_empty(x0.shape) if output_mask[2] and x0 is not None else None,
    )


class _Mapped:
    """Tensors of which some have a mapped dimension, of N, which becomes the outer part of the batch."""

    def __init__(self, N: int, A: Tensor, A_dim: int | None, b: Tensor, b_dim: int | None) -> None:
        self.N = N
        self.A, self.b = self._in_front(A, A_dim), self._in_front(b, b_dim)
        T, self.B, H = self.b.shape[1:]
        shape = self.A.shape[1:]
        self.diagonal = shape == self.b.shape[1:]
        self.constant = not self.diagonal and (len(shape) == 1 or (len(shape) == 3 and shape != (T, H, H)))
        by_steps = not self.diagonal and not self.constant
        self.shared = by_steps and (len(shape) == 3 or (shape[1] == 1 and self.B != 1))

    @staticmethod
    def _in_front(t: Tensor, dim: int | None) -> Tensor:
        return t.unsqueeze(0) if dim is None else t.movedim(dim, 0)

    def _fold(self, t: Tensor, batch: int) -> Tensor:
        return t.expand(self.N, *t.shape[1:]).movedim(0, batch).flatten(batch, batch + 1)

    def fold(self, t: Tensor | None, dim: int | None, batch: int) -> Tensor | None:
        """`t` with its batch dimension, `batch` where it is not mapped, N times as long."""
        return None if t is None else self._fold(self._in_front(t, dim), batch)

    def unfold(self, t: Tensor, batch: int) -> Tensor:
        """The mapped dimension of a result at its place, `batch`."""
        return t.unflatten(batch, (self.N, t.shape[batch] // max(self.N, 1)))

    def matrices(self, keep_shared: bool) -> Tensor:
        """A, folded; one that everything shares may stay as it is: (T, 1, H, H), or (1, 1, H)."""
        if self.diagonal:
            return self._fold(self.A, 1)
        A = self.A  # to be (N or 1, T or 1, B or 1, ...)
        if self.constant:
            A = A if A.dim() == 4 else A[:, None, None]
        elif A.dim() == 4:
            A = A.unsqueeze(2)
        if keep_shared and A.shape[0] == 1 and A.shape[2] == 1:
            return A.squeeze(0)
        return self._fold(A.expand(-1, -1, self.B, *A.shape[3:]), 1)

    def start(self, x0: Tensor | None, dim: int | None, keep_shared: bool) -> Tensor | None:
        """x0, folded; one that everything shares may stay (H)."""
        if x0 is None or (keep_shared and dim is None and x0.dim() == 1):
            return x0
        x0 = self._in_front(x0, dim)
        return self._fold(x0 if x0.dim() == 3 else x0[:, None].expand(-1, self.B, -1), 0)


def _time_first(t: Tensor | None, dim: int | None, batch_first: bool) -> tuple[Tensor | None, int | None]:
    """A tensor with time first of what each index of a mapped dimension has, where it has time, and the dimension."""
    if t is None or not batch_first or t.dim() - (dim is not None) < 3:
        return t, dim
    if dim is None:
        return t.transpose(0, 1), None
    return t.movedim(dim, 0).transpose(1, 2), 0


@torch.library.register_vmap("weft::linear_scan")
def _linear_scan_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    A: Tensor,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    transpose: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, int]:
    A, dim_of_A = _time_first(A, in_dims[0], batch_first)
    b, dim_of_b = _time_first(b, in_dims[1], batch_first)
    mapped = _Mapped(info.batch_size, A, dim_of_A, b, dim_of_b)
    x0 = mapped.start(x0, in_dims[2] if x0 is not None else None, keep_shared=True)
    x = torch.ops.weft.linear_scan(
        mapped.matrices(keep_shared=True), mapped.fold(b, dim_of_b, 1), x0, reverse=reverse, transpose=transpose
    )
    x = mapped.unfold(x, 1)
    return x.transpose(0, 2) if batch_first else x, 1


@torch.library.register_vmap("weft::linear_scan_backward")
def _linear_scan_backward_vmap(
    info: Any,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    A: Tensor,
    x: Tensor | None,
    x0: Tensor | None,
    reverse: bool,
    transpose: bool,
    output_mask: list[bool],
    batch_first: bool = False,
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    grad, dim_of_grad = _time_first(grad, in_dims[0], batch_first)
    A, dim_of_A = _time_first(A, in_dims[1], batch_first)
    x, dim_of_x = _time_first(x, in_dims[2], batch_first)
    mapped = _Mapped(info.batch_size, A, dim_of_A, grad, dim_of_grad)
    # The gradient of a shared A is a sum over the batch, but not over what is mapped.
    matrices = mapped.matrices(keep_shared=not output_mask[0])
    grad_A, grad_b, grad_x0 = torch.ops.weft.linear_scan_backward(
        mapped.fold(grad, dim_of_grad, 1),
        matrices,
        mapped.fold(x, dim_of_x, 1),
        mapped.start(x0, in_dims[3], keep_shared=False),
        reverse,
        transpose,
        output_mask,
    )
    dim_of_A = 1
    if grad_A is not None:
        grad_A = mapped.unfold(grad_A, 1)  # (T or 1, N, B, ...)
        if mapped.shared:
            grad_A = grad_A.sum(2, keepdim=mapped.A.dim() == 5)
        elif mapped.constant and mapped.A.dim() == 2:
            grad_A, dim_of_A = grad_A.sum((0, 2)), 0
        elif mapped.constant and mapped.A.shape[2] == 1:
            grad_A = grad_A.sum(2, keepdim=True)
    grad_b = None if grad_b is None else mapped.unfold(grad_b, 1)
    if batch_first:
        grad_A = grad_A.transpose(0, 2) if grad_A is not None and dim_of_A == 1 else grad_A
        grad_b = None if grad_b is None else grad_b.transpose(0, 2)
    if grad_x0 is not None:
        grad_x0 = mapped.unfold(grad_x0, 0)
        if x0.dim() - (in_dims[3] is not None) == 1:
            grad_x0 = grad_x0.sum(1)
    results = (grad_A, grad_b, grad_x0)
    return results, tuple(None if t is None else dim for t, dim in zip(results, (dim_of_A, 1, 0), strict=True))


@torch.library.register_fake("weft::pointwise_scan")
def _pointwise_scan_fake(
    init: list[Tensor], inputs: list[Tensor], parameters: list[Tensor], program: str, stacked: bool = False,
    reverse: bool = False, algorithm: str = "auto", name: str = "pointwise_scan",
) -> list[Tensor]:  # fmt: skip
    _check_lists("pointwise_scan", init=init, inputs=inputs, parameters=parameters)
    return [t.new_empty((inputs[0].shape[0], *t.shape)) for t in init]


@torch.library.register_fake("weft::pointwise_scan_backward")
def _pointwise_scan_backward_fake(
    grads: list[Tensor | None], init: list[Tensor], inputs: list[Tensor], parameters: list[Tensor],
    states: list[Tensor], program: str, stacked: bool, reverse: bool, algorithm: str, output_mask: list[bool],
) -> list[Tensor]:  # fmt: skip
    _check_lists("pointwise_scan_backward", init=init, inputs=inputs, parameters=parameters, states=states)
    return [
        t.new_empty(t.shape if wanted else (0,))
        for t, wanted in zip((*init, *inputs, *parameters), output_mask, strict=True)
    ]


def _check_lists(op: str, **lists: list[Tensor]) -> None:
    tensors = {f"{name}[{i}]": t for name, found in lists.items() for i, t in enumerate(found)}
    like = tensors["init[0]"]
    for name, t in tensors.items():
        torch._check_type(
            t.dtype == like.dtype, lambda n=name, t=t: f"{op}: {n} must have the dtype of init[0], got {t.dtype}"
        )
    check_devices(op, **tensors)


def _pointwise_scan_autocast(init, inputs, parameters, program, stacked=False, reverse=False, algorithm="auto",
                             name="pointwise_scan"):  # fmt: skip
    with below_autocast():
        wide = widest(*init, *inputs, *parameters)
        first, second = len(init), len(init) + len(inputs)
        return torch.ops.weft.pointwise_scan(
            wide[:first], wide[first:second], wide[second:], program, stacked, reverse, algorithm, name
        )


def _check_readout(A: Tensor, b: Tensor, c: Tensor, x0: Tensor | None, batch_first: bool) -> None:
    """The checks of csrc/scan/readout/linear_scan_readout.cpp, on sizes that may be symbols."""
    op = "linear_scan"  # of which c makes a read-out
    torch._check_type(
        A.dtype in _DTYPES,
        lambda: f"{op}: A must be float16, bfloat16, float32, float64, complex64 or complex128, got {A.dtype}",
    )
    for name, t in (("b", b), ("c", c), ("x0", x0)):
        if t is not None and t.dtype != A.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of A, {A.dtype}, got {t.dtype}")
    check_devices(op, A=A, b=b, c=c, x0=x0)
    steps = "(B, T, H, N)" if batch_first else "(T, B, H, N)"
    torch._check_value(b.dim() == 4, lambda: f"{op}: b must be {steps} or {steps[:-2]}1), got {tuple(b.shape)}")
    torch._check_value(A.dim() in (2, 4), lambda: f"{op}: A must be (H, N) or {steps}, got {tuple(A.shape)}")
    N, (first, second, H, last) = A.shape[-1], b.shape
    B = first if batch_first else second
    torch._check_value(
        _may_be_equal((last,), (N,)) or _may_be_equal((last,), (1,)),
        lambda: f"{op}: b must be {steps} or {steps[:-2]}1) with N = {N}, as A has it, got {tuple(b.shape)}",
    )
    fields = [(H, N), *((m, n, H, N) for m in (first, 1) for n in (second, 1))]
    for name, t in (("A", A), ("c", c)):
        torch._check_value(
            any(_may_be_equal(t.shape, shape) for shape in fields),
            lambda name=name, t=t: (
                f"{op}: {name} must be (H, N) = {(H, N)} or {steps}, of which the first two may be 1, to go with b "
                f"{tuple(b.shape)}, got {tuple(t.shape)}"
            ),
        )
    torch._check_value(
        x0 is None or any(_may_be_equal(x0.shape, shape) for shape in ((B, H, N), (H, N))),
        lambda: f"{op}: x0 must be (B, H, N) = {(B, H, N)}, or (H, N) shared by the batch, got {tuple(x0.shape)}",
    )


@torch.library.register_fake("weft::linear_scan_readout")
def _linear_scan_readout_fake(
    A: Tensor,
    b: Tensor,
    c: Tensor,
    x0: Tensor | None = None,
    *,
    reverse: bool = False,
    batch_first: bool = False,
    save: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_readout(A, b, c, x0, batch_first)
    state = torch.float32 if b.dtype in (torch.float16, torch.bfloat16) else b.dtype
    T, B, H = (b.shape[1], b.shape[0], b.shape[2]) if batch_first else b.shape[:3]
    segment = {torch.complex128: 8, torch.complex64: 16, torch.float64: 16}.get(b.dtype, 32)
    starts = b.new_empty(((T + segment - 1) // segment, B, H, A.shape[-1]) if save else (0,), dtype=state)
    return b.new_empty(b.shape[:3]), starts


@torch.library.register_fake("weft::linear_scan_readout_backward")
def _linear_scan_readout_backward_fake(
    grad: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    x0: Tensor | None,
    starts: Tensor,
    reverse: bool,
    batch_first: bool,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    _check_readout(A, b, c, x0, batch_first)
    wanted = zip((A, b, c, x0), output_mask, strict=True)
    return tuple(t.new_empty(t.shape) if t is not None and want else None for t, want in wanted)


@torch.library.register_vmap("weft::linear_scan_readout")
def _linear_scan_readout_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any, **flags: bool):
    op = torch.ops.weft.linear_scan_readout
    return tuple(one_by_one(op, info.batch_size, in_dims[: len(args)], args, flags)), (0, 0)


@torch.library.register_vmap("weft::linear_scan_readout_backward")
def _linear_scan_readout_backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any):
    wanted = [want and args[i + 1] is not None for i, want in enumerate(args[8])]

    def present(*arguments: Any) -> list[Tensor]:
        return [g for g in torch.ops.weft.linear_scan_readout_backward(*arguments) if g is not None]

    dims = [*in_dims[:6], None, None, [None] * 4]
    found = iter(one_by_one(lambda *a: present(*a), info.batch_size, dims, args, {}))
    results = tuple(next(found) if want else None for want in wanted)
    return results, tuple(None if r is None else 0 for r in results)


def _linear_scan_readout_autocast(
    A: Tensor, b: Tensor, c: Tensor, x0: Tensor | None = None, **flags: bool
) -> tuple[Tensor, Tensor]:
    with below_autocast():
        A, b, c, x0 = widest(A, b, c, x0)
        return torch.ops.weft.linear_scan_readout(A, b, c, x0, **flags)


def _linear_scan_autocast(A: Tensor, b: Tensor, x0: Tensor | None = None, **flags: bool) -> Tensor:
    with below_autocast():
        A, b, x0 = widest(A, b, x0)
        return torch.ops.weft.linear_scan(A, b, x0, **flags)


def _chain_backward_autocast(grad: Tensor, jacobians: list[Tensor], levels: int = -1) -> list[Tensor]:
    with below_autocast():
        grad, *jacobians = widest(grad, *jacobians)
        return torch.ops.weft.chain_backward(grad, jacobians, levels)


for _key in ("AutocastCPU", "AutocastCUDA"):
    LIBRARY.impl("linear_scan", _linear_scan_autocast, _key)
    LIBRARY.impl("pointwise_scan", _pointwise_scan_autocast, _key)
    LIBRARY.impl("linear_scan_readout", _linear_scan_readout_autocast, _key)
    LIBRARY.impl("chain_backward", _chain_backward_autocast, _key)
