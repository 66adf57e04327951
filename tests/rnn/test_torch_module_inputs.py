"""torch's own module tests of RNN, GRU and LSTM, on Weft's layers: its samples and error samples, its checks.

Of those that torch expects to fail with cuDNN, test_non_contiguous_tensors (cuDNN refuses a strided state) and
test_gradgrad pass with every algorithm; test_grad (vmap over the backward pass) passes wherever another algorithm than
"torch" runs.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import weft
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.common_utils import TestCase, freeze_rng_state, gradcheck, gradgradcheck

from tests.common import DEVICES, pairs

# Importing torch's test helpers forbids the whole process to set flags of torch.backends; other tests do.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
assert not torch.backends.flags_frozen()

LAYERS = {torch.nn.RNN: weft.nn.RNN, torch.nn.GRU: weft.nn.GRU, torch.nn.LSTM: weft.nn.LSTM}
INFOS = [info for info in module_db if info.module_cls in LAYERS]

devices = pytest.mark.parametrize("device", DEVICES)
infos = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.module_cls.__name__)
ALGORITHMS = ["auto", "persistent", "scan", "newton", "torch", "reference"]
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
trainings = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def samples(info, device, dtype=torch.float64, training=True, requires_grad=False, algorithm="auto"):
    """Weft's layer, its sample, and torch's layer with the same weights."""
    inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=requires_grad, training=training)
    assert inputs
    for sample in inputs:
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        theirs = info.module_cls(*arguments, **options, device=device, dtype=dtype)
        ours = LAYERS[info.module_cls](*arguments, **options, device=device, dtype=dtype, algorithm=algorithm)
        ours.load_state_dict(theirs.state_dict())
        yield ours.train(training), sample, theirs.train(training)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


@devices
@pairs(info=INFOS, algorithm=ALGORITHMS, training=[True, False], dtype=[torch.float32, torch.float64])
def test_forward(info, device, algorithm, training, dtype):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        _compare_forward(info, device, algorithm, training, dtype)


def _compare_forward(info, device, algorithm, training, dtype):
    for layer, sample, theirs in samples(info, device, dtype, training, algorithm=algorithm):
        arguments, options = sample.forward_input.args, sample.forward_input.kwargs
        found = layer(*arguments, **options)
        torch.testing.assert_close(found, theirs(*arguments, **options))
        torch.testing.assert_close(found, sample.reference_fn(layer, *arguments, **options))
        assert str(layer).replace(f", algorithm={algorithm!r}", "") == str(theirs)


@devices
@infos
@algorithms
def test_pickle(info, device, algorithm):
    for layer, sample, _ in samples(info, device, algorithm=algorithm):
        arguments = sample.forward_input.args
        twin = pickle.loads(pickle.dumps(layer))
        torch.testing.assert_close(twin(*arguments), layer(*arguments), rtol=0, atol=0)


@devices
@infos
@algorithms
def test_non_contiguous(info, device, algorithm):
    """torch's check: every other element of a tensor with a doubled last dimension gives the same results and
    gradients, also for incoming gradients that are laid out so."""

    def spread(tensor):
        wide = torch.repeat_interleave(tensor.detach(), 2, dim=-1)[..., ::2]
        assert not wide.is_contiguous()
        return wide.requires_grad_(tensor.requires_grad)

    for layer, sample, _ in samples(info, device, requires_grad=True, algorithm=algorithm):
        x, *state = sample.forward_input.args
        plain = [x, *leaves(state)]
        results, grads = [], []
        outgoing = None
        for change in (lambda t: t, spread):
            inputs = [change(t) for t in plain]
            hx = None if not state else tuple(inputs[1:]) if isinstance(state[0], tuple) else inputs[1]
            result = leaves(layer(inputs[0], hx))
            outgoing = outgoing or [torch.randn_like(r) for r in result]
            results.append(result)
            grads.append(torch.autograd.grad(result, [*inputs, *layer.parameters()], [change(g) for g in outgoing]))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*grads)


@devices
@infos
# The second derivatives of the reference are autograd's own, and those of a scan are the same operator's as of
# "persistent"; test_nn_derivatives.py has a check of each.
@pytest.mark.parametrize(
    ("algorithm", "order"),
    [(name, 1) for name in ("persistent", "scan", "torch", "reference")] + [("persistent", 2), ("torch", 2)],
)
def test_gradients(info, device, algorithm, order):
    nondet = info.gradcheck_nondet_tol if device == "cuda" else 0.0
    check = gradcheck if order == 1 else gradgradcheck
    for layer, sample, _ in samples(info, device, requires_grad=True, algorithm=algorithm):
        if order == 2 and (layer.batch_first or not (layer.bias and layer.bidirectional)):
            continue  # the same formulas, with less in them
        by_cudnn = device == "cuda" and weft.explain(layer, *sample.forward_input.args).algorithm == "torch"
        arguments = leaves(sample.forward_input.args)
        parameters = list(layer.parameters())

        def call(*tensors, layer=layer, sample=sample):
            x, *state = tensors[: len(leaves(sample.forward_input.args))]
            hx = None if not state else tuple(state) if len(state) == 2 else state[0]
            with freeze_rng_state():
                return tuple(leaves(layer(x, hx)))

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap without a rule is a loop
            batched = order == 2 or not by_cudnn  # vmap has no rule for cuDNN's backward pass
            assert check(call, (*arguments, *parameters), nondet_tol=nondet, check_batched_grad=batched, fast_mode=True)


@devices
@infos
@algorithms
def test_save_and_load(info, device, algorithm):
    for layer, sample, _ in samples(info, device, algorithm=algorithm):
        arguments = sample.forward_input.args
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert twin.algorithm == algorithm
        torch.testing.assert_close(twin(*arguments), layer(*arguments), rtol=0, atol=0)


@devices
@infos
@algorithms
def test_memory_format(info, device, algorithm):
    """A format for four and five dimensions changes nothing for a layer whose tensors have three at most."""
    for layer, sample, _ in samples(info, device, algorithm=algorithm):
        arguments = sample.forward_input.args
        before = layer(*arguments)
        for memory_format in (torch.channels_last, torch.channels_last_3d, torch.contiguous_format):
            layer.to(memory_format=memory_format)
            found = layer(*arguments)
            torch.testing.assert_close(found, before, rtol=0, atol=0)
            assert all(
                a.is_contiguous() == b.is_contiguous() for a, b in zip(*map(leaves, (found, before)), strict=True)
            )


@devices
@pairs(info=INFOS, algorithm=ALGORITHMS, swap=[True, False], set_grad=[True, False])
def test_to(info, device, algorithm, swap, set_grad):
    """torch's test of Module.to: the parameters move, stay the same objects where torch.__future__ swaps them, and the
    layer runs there as one that was made there."""
    for layer, sample, _ in samples(info, "cpu", algorithm=algorithm):
        if set_grad:
            for p in layer.parameters():
                p.grad = torch.randn_like(p)
        own = [id(p) for p in layer.parameters()]
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            layer.to(device, torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        assert all(p.device.type == device and p.dtype == torch.float32 for p in layer.parameters())
        assert all((p.grad is None) is (not set_grad) for p in layer.parameters())
        assert not swap or own == [id(p) for p in layer.parameters()]
        construct = sample.constructor_input
        fresh = type(layer)(*construct.args, **construct.kwargs, device=device, algorithm=algorithm)
        fresh.load_state_dict(layer.state_dict())

        def moved(value):
            if isinstance(value, torch.Tensor):
                return value.to(device, torch.float32)
            return tuple(moved(v) for v in value)

        arguments = moved(sample.forward_input.args)
        torch.testing.assert_close(layer(*arguments), fresh(*arguments), rtol=0, atol=0)


@pytest.mark.cuda
@infos
@algorithms
@trainings
def test_cpu_gpu_parity(info, algorithm, training):
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for layer, sample, _ in samples(info, "cpu", torch.float32, True, requires_grad=True, algorithm=algorithm):
            twin = copy.deepcopy(layer).cuda()
            found = []
            for each, device in ((layer, "cpu"), (twin, "cuda")):
                x, *state = sample.forward_input.args
                inputs = [t.detach().to(device).requires_grad_() for t in (x, *leaves(state))]
                hx = None if not state else tuple(inputs[1:]) if isinstance(state[0], tuple) else inputs[1]
                if not training:
                    with torch.no_grad():
                        result = leaves(each.eval()(inputs[0], hx))
                    found.append([r.cpu() for r in result])
                    continue
                result = leaves(each(inputs[0], hx))
                grads = torch.autograd.grad(sum(r.pow(2).sum() for r in result), [*inputs, *each.parameters()])
                found.append([t.cpu() for t in (*result, *grads)])
            # cuDNN's own LSTM differs from the CPU's by more than 1e-4 here.
            torch.testing.assert_close(*found, rtol=3e-4, atol=3e-4)


@devices
@infos
def test_factory_arguments(info, device):
    for layer, _, _ in samples(info, device, torch.float32):
        options = copy.copy(vars(layer))
        made = {"input_size": options["input_size"], "hidden_size": options["hidden_size"], "num_layers": 2}
        kind = type(layer)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert all(p.dtype == dtype for p in kind(**made, dtype=dtype, device=device).parameters())
        assert all(p.is_meta for p in kind(**made, device="meta").parameters())
        assert all(p.device.type == device for p in kind(**made, device="meta").to_empty(device=device).parameters())


@devices
@infos
@algorithms
def test_train_and_eval_differ(info, device, algorithm):
    """With dropout, as torch's samples have none."""
    for layer, sample, _ in samples(info, device, algorithm=algorithm):
        if layer.mode == "RNN_RELU":
            continue  # all of its units may be off
        layer.dropout = 0.5
        arguments = sample.forward_input.args
        results = {torch.equal(layer.train()(*arguments)[0], layer.eval()(*arguments)[0]) for _ in range(8)}
        assert False in results


@devices
@infos
@algorithms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors(info, device, algorithm, dtype):
    errors = info.module_error_inputs_func(info, device=device, dtype=dtype, requires_grad=False, training=False)
    assert errors
    case = TestCase()
    for error in errors:
        sample = error.module_error_input
        construct = sample.constructor_input
        kind = LAYERS[info.module_cls]
        if error.error_on == ModuleErrorEnum.CONSTRUCTION_ERROR:
            with case.assertRaisesRegex(error.error_type, error.error_regex):
                kind(*construct.args, **construct.kwargs, algorithm=algorithm)
        else:
            layer = kind(*construct.args, **construct.kwargs, algorithm=algorithm)
            with case.assertRaisesRegex(error.error_type, error.error_regex):
                layer(*sample.forward_input.args, **sample.forward_input.kwargs)
