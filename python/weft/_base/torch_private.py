"""What Weft uses of torch's own internals, in one place: all that a new version of torch may move without a word."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TypeVar

import torch
from torch import _VF, Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.nn.modules import module
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "COMPILER",
    "COMPILERS_ISINSTANCE",
    "FAKE_TENSORS",
    "GLOBAL_HOOKS",
    "RNN_KERNELS",
    "TorchDispatchMode",
    "any_autocast",
    "autograd_inside_an_op",
    "balances_attention",
    "below_autocast",
    "constant_when_compiled",
    "device_sleep",
    "differentiated_by_transform",
    "fake_tensors",
    "foreach_add_",
    "foreach_sub_",
    "fp32_precision",
    "functional_collectives",
    "group_named",
    "has_hooks",
    "has_step_hooks",
    "in_forward_mode",
    "in_torchscript_trace",
    "in_transform",
    "is_eager",
    "keeps_graph",
    "maps_alone",
    "nn_functions",
    "onnx_exporting",
    "outside_transforms",
    "parse_to",
    "step_hooks",
    "tracing_context",
    "tree_leaves",
    "uncached_parametrizations",
    "without_forward_mode",
    "without_modes",
    "without_torch_function",
    "wrapper_tensor",
]

# Functions of torch's own, not wrapped: what a layer asks in every call is bound by the host.
any_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is enabled for any device."""

foreach_add_, foreach_sub_ = torch._foreach_add_, torch._foreach_sub_
"""Several tensors changed in place by one launch."""

in_torchscript_trace = torch._C._is_tracing
"""Whether torch.jit.trace, or the ONNX exporter that builds on it, records here."""

in_transform = torch._C._are_functorch_transforms_active
"""Whether a torch.func transform is active."""

device_sleep = torch.cuda._sleep
"""Lets the current stream wait so many cycles of the GPU's clock."""

fp32_precision = torch._C._get_fp32_precision_getter
"""(backend, operator) -> "ieee", "tf32", ... or "none", whichever of torch's settings says so."""

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass that runs keeps its graph."""

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which torch's functions treat classes of tensors with a ``__torch_function__`` as any tensor."""

nn_functions = torch._C._nn
"""Those of torch.nn.functional's functions that are not written in Python."""

outside_transforms = torch._C._DisableFuncTorch
"""A context in which tensors are made outside of torch.func's transforms, whose own do not outlive them."""

parse_to = torch._C._nn._parse_to
"""The arguments of Tensor.to -> (device, dtype, non_blocking, memory format)."""

tracing_context = TracingContext.try_get
"""torch.compile's or torch.export's state where it traces in this thread, None elsewhere."""

wrapper_tensor = Tensor._make_wrapper_subclass
"""(class, sizes, dtype=, device=) -> a tensor without data, of a class that has ``__torch_dispatch__``."""

without_modes = _disable_current_modes
"""A context in which no mode sees torch's operations, a counter of them neither."""

COMPILER = "torch._dynamo."
"""What the names of torch.compile's modules begin with."""

COMPILERS_ISINSTANCE = "torch._dynamo.variables.builtin"
"""The one of them that answers isinstance in compiled code."""

FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""The module of fake tensors, and the logger that it writes to."""

GLOBAL_HOOKS = (
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
)
"""The hooks of all modules, by their handles; torch changes these dictionaries in place."""

RNN_KERNELS = {"rnn_tanh": _VF.rnn_tanh, "rnn_relu": _VF.rnn_relu, "gru": _VF.gru, "lstm": _VF.lstm}
"""What torch.nn's layers call."""


_Function = TypeVar("_Function", bound=Callable)


def constant_when_compiled(function: _Function) -> _Function:
    """What torch.compiler.assume_constant_result does: torch.compile calls `function` once and takes the result for a
    constant. torch's own decorator imports the whole compiler, which takes seconds."""
    function._dynamo_marked_constant = True
    return function


@constant_when_compiled
def onnx_exporting() -> bool:
    """Whether torch.onnx.export exports here."""
    return torch.onnx.is_in_onnx_export()


def is_eager(*tensors: Tensor) -> bool:
    """Whether what an op does may be done without the op: nobody traces, transforms or watches, no tangents propagate,
    and the tensors are plain ones."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not (in_transform() or in_forward_mode() or in_torchscript_trace())
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    )


def functional_collectives():
    """torch.ops' collectives, which a graph of torch.compile holds and, once torch's module of them is imported, never
    drops."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def balances_attention() -> bool:
    """Whether torch's context_parallel is entered and balances loads: then a rank has a piece of a sequence's head and
    one of its tail."""
    attention = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if attention is None:
        return False
    replaced = torch.nn.functional.scaled_dot_product_attention in getattr(attention, "_replaced_functions", {})
    return replaced and getattr(getattr(attention, "_cp_options", None), "enable_load_balance", False)


def group_named(name: str):
    """The ProcessGroup of this name, by which collectives in a graph know it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def has_hooks(parameter: Tensor) -> bool:
    """Whether something else happens where the parameter gets a gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def step_hooks(optimizer: Optimizer) -> tuple[dict, ...]:
    """What else happens in the optimizer's step, before or after it: dictionaries that torch changes in place."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return *own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether something else happens in the optimizer's step, before or after it."""
    return any(map(bool, step_hooks(optimizer)))


def in_forward_mode() -> bool:
    """Whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def without_forward_mode() -> AbstractContextManager[None]:
    """A context in which no tangent propagates."""
    return forward_ad._set_fwd_grad_enabled(False)


def fake_tensors() -> ModuleType:
    """The module of fake tensors, which is slow to import."""
    return importlib.import_module(FAKE_TENSORS)


def _transforms() -> set:
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters  # slow to import

    return {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}


def maps_alone() -> bool:
    """Whether of all torch.func transforms vmap alone is active. Dynamo cannot trace it."""
    return _transforms() == {torch._C._functorch.TransformType.Vmap}


def differentiated_by_transform(*tensors: Tensor | None) -> bool:
    """Whether torch.func.grad, jvp, vjp or forward-mode AD sees these tensors: they refuse C++ autograd functions."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        kinds = torch._C._functorch.TransformType
        if _transforms() & {kinds.Grad, kinds.Jvp}:
            return True
    return in_forward_mode() and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def below_autocast() -> torch._C._ExcludeDispatchKeyGuard:
    """A context in which autocast's rules are passed by."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys.add(torch._C.DispatchKey.AutocastCUDA))


def autograd_inside_an_op() -> torch._C._ForceDispatchKeyGuard:
    """An op's kernel runs below autograd; this context lets autograd in again, for a computation that stays inside."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """What torch.nn.utils.parametrize makes in here stays out of the cache of its ``cached()``, and comes from none."""
    caching = parametrize._cache_enabled
    parametrize._cache_enabled -= caching
    try:
        yield
    finally:
        parametrize._cache_enabled += caching
