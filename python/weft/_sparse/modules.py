"""Which generator serves which torch.nn module, and how to add one."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from . import jacobians as of
from .csr import BatchedCSR

Jacobian = BatchedCSR | Tensor
Function = Callable[[nn.Module, Tensor, Tensor], Jacobian]

_registered: dict[type[nn.Module], Function] = {}
_built_in: dict[type[nn.Module], Callable[..., BatchedCSR]] = {}
# What a generator keeps with a module from call to call.
_owned: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def register_jacobian(
    module_type: type[nn.Module], function: Function | None = None
) -> Function | Callable[[Function], Function]:
    """Says how the transposed Jacobian of a module type is made; also as a decorator, ``@register_jacobian(Type)``.

    Args:
        module_type: a subclass of ``torch.nn.Module``; what was registered for it before is replaced.
        function: ``function(module, input, output)``, of what went in and came out, batch first, gives a
            :class:`BatchedCSR` or a dense ``(n_in, n_out)`` or ``(B, n_in, n_out)``.

    Subclasses inherit it unless they have a ``forward`` of their own.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(f"register_jacobian: module_type must be a subclass of torch.nn.Module, got {module_type!r}")
    if function is None:
        return lambda decorated: register_jacobian(module_type, decorated)
    if not callable(function):
        raise TypeError(f"register_jacobian: function must be callable, got {type(function).__name__}")
    _registered[module_type] = function
    return function


def find_jacobian(module: nn.Module) -> Callable[..., Jacobian] | None:
    """``f(module, input, output, prune)``, None where there is none."""
    for cls in type(module).__mro__:
        if cls in _registered:
            function = _registered[cls]
            return lambda module, input, output, prune: function(module, input, output)
        if cls in _built_in:
            return _built_in[cls]
        if "forward" in vars(cls):
            return None
    return None


def unknown(module: nn.Module) -> str:
    name = type(module).__qualname__
    return f"no Jacobian is known for {name}; weft.sparse.register_jacobian({name}, function) adds one"


_INDICES = "transposed_jacobian: MaxPool2d with return_indices has two outputs, and no Jacobian"


def transposed_jacobian(module: nn.Module, input: Tensor, output: Tensor, *, prune: bool = False) -> Jacobian:
    """The transposed Jacobian ``(n_in, n_out)`` of a module at what went in and came out.

    Args:
        module: a Conv1d, Conv2d, Linear, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d, ReLU, LeakyReLU, GELU, Tanh, Sigmoid,
            Flatten, Dropout, BatchNorm1d, BatchNorm2d or Identity of ``torch.nn``, or of a type given to
            :func:`register_jacobian`.
        input, output: batch first.
        prune: leaves out weights that are exactly zero.

    Returns:
        A :class:`BatchedCSR`, or what a registered function returned.

    Raises:
        TypeError: no Jacobian is known for this type.
        ValueError: dropout in training mode, max-pooling that returns indices, a flatten of the batch; a result that
            does not fit the sizes.
        RuntimeError: a batch norm that normalises by the batch.
    """
    function = find_jacobian(module)
    if function is None:
        raise TypeError(f"transposed_jacobian: {unknown(module)}")
    if isinstance(output, tuple) and isinstance(module, nn.MaxPool2d) and module.return_indices:
        raise ValueError(_INDICES)
    for name, t in (("input", input), ("output", output)):
        if not isinstance(t, Tensor):
            raise TypeError(f"transposed_jacobian: {name} must be a Tensor, got {type(t).__name__}")
        if t.dim() < 1 or t.shape[0] != input.shape[0]:
            raise ValueError(
                f"transposed_jacobian: input and output must have the batch first, got {tuple(input.shape)} and "
                f"{tuple(output.shape)}"
            )
    jacobian = function(module, input, output, prune)
    return checked(jacobian, module, input, output)


def checked(jacobian: object, module: nn.Module, input: Tensor, output: Tensor) -> Jacobian:
    """A Jacobian that fits what went in and came out; errors name the layer."""
    name = type(module).__qualname__
    if not isinstance(jacobian, (BatchedCSR, Tensor)):
        raise TypeError(
            f"transposed_jacobian: the function of {name} must return a BatchedCSR or a Tensor, got "
            f"{type(jacobian).__name__}"
        )
    B = input.shape[0]
    sizes = (input.numel() // B, output.numel() // B) if B else (_elements(input), _elements(output))
    if isinstance(jacobian, BatchedCSR):
        shape, batch = jacobian.shape, jacobian.batch_size
    else:
        shape, batch = tuple(jacobian.shape[-2:]), jacobian.shape[0] if jacobian.dim() == 3 else None
        if jacobian.dim() not in (2, 3):
            shape = tuple(jacobian.shape)
    if shape != sizes or batch not in (None, B):
        got = shape if batch is None else (batch, *shape)
        raise ValueError(
            f"transposed_jacobian: the Jacobian of {name} must be (n_in, n_out) = {sizes}, or that for a batch of {B}, "
            f"got {got}"
        )
    return jacobian


def _elements(t: Tensor) -> int:
    n = 1
    for size in t.shape[1:]:
        n *= size
    return n


def _built(*types: type[nn.Module]) -> Callable[[Callable[..., BatchedCSR]], Callable[..., BatchedCSR]]:
    def add(function: Callable[..., BatchedCSR]) -> Callable[..., BatchedCSR]:
        for module_type in types:
            _built_in[module_type] = function
        return function

    return add


def _check_dims(module: nn.Module, input: Tensor, *dims: int) -> None:
    if input.dim() not in dims:
        raise ValueError(
            f"transposed_jacobian: the input of {type(module).__qualname__} must have {' or '.join(map(str, dims))} "
            f"dimensions, the batch first, got {tuple(input.shape)}"
        )


def _identity(input: Tensor) -> BatchedCSR:
    return of.flatten_jacobian(tuple(input.shape[1:]), dtype=input.dtype, device=input.device)


@_built(nn.Conv1d, nn.Conv2d)
def _conv(module, input, output, prune):
    dims = len(module.kernel_size)
    _check_dims(module, input, dims + 2)
    return of._conv(
        f"conv{dims}d_jacobian",
        dims,
        module.weight,
        input.shape[1:],
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.padding_mode,
        prune,
        _owned.setdefault(module, {}),
    )


@_built(nn.Linear)
def _linear(module, input, output, prune):
    if input.dim() < 2:
        _check_dims(module, input, 2)
    return of._linear(module.weight, input.shape[1:], prune, _owned.setdefault(module, {}))


@_built(nn.MaxPool2d)
def _max_pool2d(module, input, output, prune):
    if module.return_indices:
        raise ValueError(_INDICES)
    _check_dims(module, input, 4)
    return of.max_pool2d_jacobian(
        input, module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
    )


@_built(nn.AvgPool2d)
def _avg_pool2d(module, input, output, prune):
    _check_dims(module, input, 4)
    return of.avg_pool2d_jacobian(
        input.shape[1:],
        module.kernel_size,
        module.stride,
        module.padding,
        module.ceil_mode,
        module.count_include_pad,
        module.divisor_override,
        dtype=input.dtype,
        device=input.device,
    )


@_built(nn.AdaptiveAvgPool2d)
def _adaptive_avg_pool2d(module, input, output, prune):
    _check_dims(module, input, 4)
    return of.adaptive_avg_pool2d_jacobian(input.shape[1:], module.output_size, dtype=input.dtype, device=input.device)


@_built(nn.ReLU)
def _relu(module, input, output, prune):
    return of.relu_jacobian(input)


@_built(nn.LeakyReLU)
def _leaky_relu(module, input, output, prune):
    return of.leaky_relu_jacobian(input, module.negative_slope)


@_built(nn.GELU)
def _gelu(module, input, output, prune):
    return of.gelu_jacobian(input, module.approximate)


@_built(nn.Tanh)
def _tanh(module, input, output, prune):
    return of.tanh_jacobian(input)


@_built(nn.Sigmoid)
def _sigmoid(module, input, output, prune):
    return of.sigmoid_jacobian(input)


@_built(nn.Flatten)
def _flatten(module, input, output, prune):
    start, end = module.start_dim % max(input.dim(), 1), module.end_dim % max(input.dim(), 1)
    if start == 0 and end != 0:
        raise ValueError("transposed_jacobian: Flatten must leave the batch alone, got start_dim = 0")
    return _identity(input)


@_built(nn.Identity)
def _same(module, input, output, prune):
    return _identity(input)


@_built(nn.Dropout)
def _dropout(module, input, output, prune):
    if module.training:
        raise ValueError(
            "transposed_jacobian: the mask of Dropout in training mode cannot be read off its input and output, where "
            "the input has zeros; weft.sparse.dropout_jacobian takes the mask"
        )
    return _identity(input)


@_built(nn.BatchNorm1d, nn.BatchNorm2d)
def _batch_norm(module, input, output, prune):
    check_batch_norm("transposed_jacobian", module)
    _check_dims(module, input, *((2, 3) if isinstance(module, nn.BatchNorm1d) else (4,)))
    weight = None if module.weight is None else module.weight.to(input.dtype)
    return of.batch_norm_jacobian(tuple(input.shape[1:]), module.running_var.to(input.dtype), weight, module.eps)


def unwritten(module: nn.Module, input: Tensor, output: Tensor, prune: bool, settled: bool) -> of.Unwritten | None:
    """The Jacobian of a layer as weft::layer_chain reads it, None where it has to be written; for modules of torch's
    own types. `settled`: whether the weight is known to have the zeros that it had last."""
    kind = type(module)
    if kind not in _unwritten or kind in _registered:
        return None
    make, settings = _unwritten[kind]
    owned = _owned.get(module)
    if owned is None:
        owned = _owned[module] = {}
    weight = module._parameters.get("weight") if module._parameters else None
    key = (
        input.shape,
        input.device,
        None if weight is None else weight.shape,
        prune,
        None if settings is None else settings(module.__dict__),
    )
    # What is kept serves as long as the zeros are those that it was made for.
    found_key, found, pruned = owned.get("unwritten", (None, None, None))
    if found_key == key and (weight is None or not prune or (settled and owned.get("pruned") is pruned)):
        return found
    made = make(module, input, output, prune, owned)
    if found is None or made is None or made.pattern is not found.pattern:  # the same one is the same object
        found = made
    owned["unwritten"] = key, found, owned.get("pruned")
    return found


def _unwritten_conv(module, input, output, prune, owned) -> of.Unwritten | None:
    if module.padding_mode != "zeros" or module._parameters.get("weight") is None:
        return None
    dims = len(module.kernel_size)
    settings = (module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
    op = f"conv{dims}d_jacobian"
    return of._conv(op, dims, module.weight, input.shape[1:], *settings, prune, owned, unwritten=True)


def _unwritten_linear(module, input, output, prune, owned) -> of.Unwritten | None:
    if module._parameters.get("weight") is None or input.dim() != 2:
        return None
    return of._linear(module.weight, input.shape[1:], prune, owned, unwritten=True)


def _unwritten_max_pool2d(module, input, output, prune, owned) -> of.Unwritten | None:
    settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    return None if module.return_indices else of.unwritten_max_pool2d(input, *settings)


_of_conv = operator.itemgetter("stride", "padding", "dilation", "groups", "padding_mode")
_of_pool = operator.itemgetter("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
# With what their patterns depend on beside sizes.
_unwritten: dict[type[nn.Module], tuple[Callable[..., of.Unwritten | None], Callable[[dict], tuple] | None]] = {
    nn.Conv1d: (_unwritten_conv, _of_conv),
    nn.Conv2d: (_unwritten_conv, _of_conv),
    nn.Linear: (_unwritten_linear, None),
    nn.MaxPool2d: (_unwritten_max_pool2d, _of_pool),
    nn.ReLU: (lambda module, input, output, prune, owned: of.unwritten_relu(output), None),
}


def known_zeros(module: nn.Module) -> Tensor | None:
    """Where a module's weight was not zero when its pattern was last looked at."""
    owned = _owned.get(module)
    weight = module._parameters.get("weight")
    if owned is None or weight is None or "pruned" not in owned:
        return None
    kept = owned["pruned"][1].kept
    fits = kept.numel() == weight.numel() and kept.device == weight.device and weight.is_contiguous()
    return kept if fits and kept.is_contiguous() else None


def zeros_compared(modules: Iterable[nn.Module]) -> AbstractContextManager[bool]:
    """A context in which the pruned patterns of all these modules have been looked at together: True where they are
    known to be those of before."""
    owners = [(m, _owned[m]) for m in dict.fromkeys(modules) if m in _owned]
    return of.zeros_compared([(m.weight, owned) for m, owned in owners if getattr(m, "weight", None) is not None])


def check_batch_norm(op: str, module: nn.Module) -> None:
    if module.training or module.running_var is None:
        raise RuntimeError(
            f"{op}: {type(module).__qualname__} normalises by the batch here, in training mode or without running "
            "statistics, so that each output depends on every sample and none has a Jacobian of its own; call eval()"
        )
