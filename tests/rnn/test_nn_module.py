"""The layers as modules: dropout, constructors, state, copies, hooks and checkpoints."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import weft
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.common import pairs
from tests.rnn.layers import (
    ALGORITHMS,
    CELLS,
    LAYERS,
    OPTIONS,
    H,
    I,
    _pickled,
    algorithms,
    assert_layers_agree,
    assert_same,
    cells,
    cells_and_projected,
    devices,
    flat,
    layers,
    states,
)

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


@devices
@cells_and_projected
@algorithms
def test_dropout_only_while_training(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, dropout=0.5)
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert_same(flat(ours.eval()(x)), flat(theirs.eval()(x)))
    runs = [ours.train()(x)[0] for _ in range(2)]
    assert not torch.equal(*runs)
    seeded = []
    for _ in range(2):
        torch.manual_seed(7)
        seeded.append(ours(x)[0])
    assert torch.equal(*seeded)


@devices
@cells_and_projected
@algorithms
def test_dropout_of_everything(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2, dropout=1.0)
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device)
    assert_layers_agree(ours, theirs, x)


@devices
@algorithms
def test_dropout_rate(device, algorithm):
    layer = weft.nn.RNN(1, 1, 2, "relu", False, dropout=0.3, device=device, algorithm=algorithm)
    for name, parameter in layer.named_parameters():
        torch.nn.init.constant_(parameter, float("ih" in name))
    output = layer(torch.ones(200, 100, 1, device=device))[0]
    kept = output != 0
    torch.testing.assert_close(output[kept], torch.full_like(output[kept], 1 / 0.7))
    # 20,000 draws: five standard deviations are 0.016.
    assert abs(kept.float().mean().item() - 0.7) < 0.016


@cells
def test_constructor_is_torchs(cell):
    ours, theirs, extra = CELLS[cell]
    for options in (*OPTIONS.values(), {"dropout": 0.2, "num_layers": 2}):
        torch.manual_seed(3)
        a = ours(I, H, **extra, **options)
        torch.manual_seed(3)
        b = theirs(I, H, **extra, **options)
        assert repr(a) == repr(b)
        assert list(a.state_dict()) == list(b.state_dict())
        for name, value in a.state_dict().items():
            assert torch.equal(value, b.state_dict()[name])
        ours_only = {"_algorithm", "return_cells"}
        assert vars(a).keys() - ours_only == vars(b).keys()
        for name in ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "proj_size"):
            assert getattr(a, name) == getattr(b, name)
        assert [[p.shape for p in w] for w in a.all_weights] == [[p.shape for p in w] for w in b.all_weights]
        public = {n for n in dir(b) if not n.startswith("_")}
        assert public <= {n for n in dir(a)}
    assert isinstance(a, torch.nn.RNNBase) and not issubclass(ours, theirs)


@cells
def test_positional_arguments(cell):
    ours, theirs, _ = CELLS[cell]
    middle = ("relu",) if "rnn" in ours.__name__.lower() else ()
    arguments = (I, H, 2, *middle, False, True, 0.5, True)
    assert repr(ours(*arguments)) == repr(theirs(*arguments))


def test_algorithm_is_shown_and_may_be_set():
    layer = weft.nn.GRU(I, H, algorithm="scan")
    assert repr(layer) == "GRU(3, 4, algorithm='scan')"
    layer.algorithm = "torch"
    assert layer.algorithm == "torch" and weft.explain(layer, torch.randn(100, 2, I)).algorithm == "torch"
    with pytest.raises(ValueError, match=r"auto.*persistent.*scan.*newton.*torch.*reference"):
        layer.algorithm = "blelloch"
    assert layer.algorithm == "torch"


@cells
def test_unknown_algorithms(cell):
    ours, _, extra = CELLS[cell]
    with pytest.raises(ValueError, match=r"'cudnn'.*'auto', 'persistent', 'scan', 'newton', 'torch', 'reference'"):
        ours(I, H, algorithm="cudnn", **extra)


@devices
@cells
def test_state_dict_goes_both_ways(device, cell):
    ours, theirs, extra = CELLS[cell]
    ours, theirs = (c(I, H, 2, bidirectional=True, device=device, **extra) for c in (ours, theirs))
    x = torch.randn(5, 2, I, device=device)
    assert not torch.equal(ours(x)[0], theirs(x)[0])
    theirs.load_state_dict(ours.state_dict())
    assert_same(flat(ours(x)), flat(theirs(x)), torch.float32)
    torch.nn.init.uniform_(theirs.weight_hh_l1)
    ours.load_state_dict(theirs.state_dict())
    assert_same(flat(ours(x)), flat(theirs(x)), torch.float32)


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@devices
@cells
@pytest.mark.parametrize("duplicate", [_pickled, _saved, copy.deepcopy])
def test_copies(device, cell, duplicate):
    ours, _ = layers(cell, device, algorithm="scan", num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    before = flat(ours(x))
    twin = duplicate(ours)
    assert twin.algorithm == "scan" and type(twin) is type(ours)
    assert all(torch.equal(a, b) for a, b in zip(before, flat(twin(x)), strict=True))
    with torch.no_grad():
        twin.weight_hh_l1.mul_(2)
    assert not torch.equal(twin(x)[0], before[0])
    assert torch.equal(ours(x)[0], before[0])


@devices
@cells_and_projected
@algorithms
def test_changed_weights_are_seen(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)

    def in_place(layer):
        with torch.no_grad():
            layer.weight_hh_l0.mul_(2)

    def data(layer):
        layer.weight_ih_l1.data = layer.weight_ih_l1.data * 2

    def replaced(layer):
        layer.bias_ih_l0 = torch.nn.Parameter(layer.bias_ih_l0.detach() + 1)

    def behind(layer):
        layer._parameters["weight_hh_l1"] = torch.nn.Parameter(layer.weight_hh_l1.detach() * 2)

    def loaded(layer):
        layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()})

    def moved(layer):
        layer.float().double()

    def parametrized(layer):
        parametrize.register_parametrization(layer, "weight_hh_l0", _Doubled())

    def behind_parametrized(layer):
        with torch.no_grad():
            layer.parametrizations.weight_hh_l0.original.mul_(-1)

    for change in (in_place, data, replaced, behind, loaded, moved, parametrized, behind_parametrized):
        ours(x), theirs(x)
        change(ours), change(theirs)
        assert_layers_agree(ours, theirs, x)


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@devices
@cells_and_projected
@algorithms
def test_weight_norm(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    with pytest.warns(FutureWarning):
        for layer in (ours, theirs):
            torch.nn.utils.weight_norm(layer, "weight_hh_l0")
    assert_layers_agree(ours, theirs, x)
    with torch.no_grad():
        ours.weight_hh_l0_g.mul_(3), theirs.weight_hh_l0_g.mul_(3)
    assert_layers_agree(ours, theirs, x)


@devices
@cells_and_projected
@algorithms
def test_functional_call(device, cell, algorithm):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    own = flat(ours(x))
    parameters = {k: torch.randn_like(v) for k, v in ours.named_parameters()}
    results = [flat(torch.func.functional_call(layer, parameters, (x,))) for layer in (ours, theirs)]
    assert_same(*results)
    assert all(torch.equal(a, b) for a, b in zip(own, flat(ours(x)), strict=True))


@devices
@cells_and_projected
@algorithms
def test_gradients_only_where_asked(device, cell, algorithm):
    ours, _ = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    ours.weight_hh_l0.requires_grad_(False)
    ours(x)[0].sum().backward()
    assert ours.weight_hh_l0.grad is None and ours.weight_ih_l0.grad is not None
    with torch.no_grad():
        assert not any(t.requires_grad for t in flat(ours(x)))
    ours.requires_grad_(False)
    assert not any(t.requires_grad for t in flat(ours(x)))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ours(x)[0].sum(), x)
    assert grad.shape == x.shape


@devices
@cells
@pytest.mark.parametrize("algorithm", ["persistent", "scan"])
def test_training_on_tensors_of_inference_mode(device, cell, algorithm):
    """Features that a frozen network made: autograd refuses to save them, and the layer saves a copy."""
    ours, _ = layers(cell, device, algorithm=algorithm)
    with torch.inference_mode():
        x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
        state = states(ours, 2)
    hx = state if ours.mode == "LSTM" else state[0]
    grads = []
    for inputs in ((x, hx), torch.utils._pytree.tree_map(torch.clone, (x, hx))):
        result = flat(ours(*inputs))
        grads.append(torch.autograd.grad(sum(r.sum() for r in result), list(ours.parameters())))
    assert x.is_inference() and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@devices
@cells_and_projected
@algorithms
def test_repetition_is_bit_equal(device, cell, algorithm):
    ours, _ = layers(cell, device, torch.float32, algorithm, sizes=(5, 16), num_layers=2, bidirectional=True)
    x = torch.randn(64, 3, 5, device=device)
    runs = []
    for _ in range(2):
        result = flat(ours(x))
        runs.append([*result, *torch.autograd.grad(sum(r.sum() for r in result), list(ours.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@devices
@pairs(cell=LAYERS, algorithm=ALGORITHMS, reentrant=[False, True])
def test_checkpointing(device, cell, algorithm, reentrant):
    ours, theirs = layers(cell, device, algorithm=algorithm)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)

    def run(layer, x, hx):
        result = flat(checkpoint(layer, x, use_reentrant=reentrant) if layer is ours else layer(x))
        return result[0], tuple(result[1:])

    if not reentrant:
        assert_layers_agree(ours, theirs, x, run=run)
        return
    # Reentrant checkpointing forbids torch.autograd.grad.
    for layer in (ours, theirs):
        run(layer, x.requires_grad_(), None)[0].pow(2).sum().backward()
    grads = [[p.grad for p in layer.parameters()] for layer in (ours, theirs)]
    assert_same(*grads)
