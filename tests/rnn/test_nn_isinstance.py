"""The layers to programs that ask what they are: isinstance of torch's layers, and what goes by ``__class__``."""

from __future__ import annotations

import abc
import copy
import functools
import io
import pickle

import pytest
import torch
import weft
from torch.nn.utils import parametrizations, parametrize

from tests.rnn.layers import CELLS, H, I, assert_same, cells, flat, layers

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")

# torch 2.15 answers isinstance by the type, and guards on a __class__ that it did not read: docs/guide/programs.rst.
by_the_type = pytest.mark.xfail(torch.__version__ >= "2.12", reason="torch.compile goes by the type", strict=False)
TORCHS = (torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM)


@cells
def test_isinstance_of_torchs_layer(cell):
    ours, theirs, extra = CELLS[cell]
    layer = ours(I, H, **extra)
    assert isinstance(layer, theirs) and isinstance(layer, torch.nn.RNNBase) and isinstance(layer, ours)
    assert isinstance(layer, (torch.nn.Linear, theirs))
    assert not any(isinstance(layer, other) for other in TORCHS if other is not theirs)
    assert type(layer) is ours and not isinstance(theirs(I, H, **extra), ours)
    assert repr(layer) == repr(theirs(I, H, **extra))


@cells
def test_shown_class_is_the_layers_own(cell):
    ours, _, extra = CELLS[cell]
    layer = ours(I, H, **extra)
    shown = layer.__class__
    assert issubclass(shown, ours) and shown is ours(I, H, **extra).__class__
    assert (shown.__name__, shown.__module__, shown.__qualname__) == (ours.__name__, "weft.nn", ours.__name__)
    assert shown.__bases__[:-1] == ours.__bases__ and dir(shown) == dir(ours) and shown.forward is ours.forward
    assert type(shown(I, H)) is type(shown.__new__(shown)) is ours
    assert pickle.loads(pickle.dumps(shown)) is ours and copy.deepcopy(shown) is shown

    class Derived(shown):
        pass

    assert Derived.__bases__ == (ours,) and Derived.__module__ == __name__
    assert layer.__class__ is shown


class Own(weft.nn.GRU):
    def twice(self, x):
        return 2 * self(x)[0]

    def again(self):
        return self.__class__(self.input_size, self.hidden_size)


class Abstract(weft.nn.LSTM, abc.ABC):
    pass


def test_subclasses():
    own = Own(I, H)
    assert isinstance(own, torch.nn.GRU) and isinstance(own, Own) and not isinstance(own, torch.nn.LSTM)
    assert type(own.again()) is Own and repr(own) == "Own(3, 4)"
    abstract = Abstract(I, H)
    assert isinstance(abstract, torch.nn.LSTM) and isinstance(abstract, Abstract)
    assert not isinstance(weft.nn.LSTM(I, H), abstract.__class__)


def test_class_may_be_assigned():
    layer = weft.nn.GRU(I, H)
    layer.__class__ = Own
    assert type(layer) is Own and layer.twice(torch.randn(5, 2, I)).shape == (5, 2, H)
    layer.__class__ = weft.nn.GRU(I, H).__class__
    assert type(layer) is weft.nn.GRU
    with pytest.raises(TypeError, match="__class__"):
        layer.__class__ = 3


@cells
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(cell, protocol):
    ours, _ = layers(cell, "cpu", algorithm="scan", num_layers=2)
    twin = pickle.loads(pickle.dumps(ours, protocol))
    assert type(twin) is type(ours) and twin.algorithm == "scan"
    x = torch.randn(5, 2, I, dtype=torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(flat(ours(x)), flat(twin(x)), strict=True))


def test_pickles_of_before():
    """By object's own answer, which is what torch.save and pickle wrote before the layers had one."""
    layer = weft.nn.LSTM(I, H)
    function, arguments, state = object.__reduce_ex__(layer, 2)[:3]
    twin = function(*arguments)
    twin.__setstate__(copy.deepcopy(state))
    x = torch.randn(5, 2, I)
    assert type(twin) is weft.nn.LSTM and torch.equal(twin(x)[0], layer(x)[0])


@cells
def test_copies(cell):
    ours, _ = layers(cell, "cpu")
    shallow = copy.copy(ours)
    assert type(shallow) is type(ours) and shallow.weight_hh_l0 is ours.weight_hh_l0
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(ours), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)[0]) is type(copy.deepcopy(ours)) is type(ours)


@cells
def test_weight_and_spectral_norm(fresh_dynamo, cell):
    ours, theirs = layers(cell, "cpu")
    x = torch.randn(5, 2, I, dtype=torch.float64)
    for layer in (ours, theirs):
        parametrizations.weight_norm(layer, "weight_hh_l0")
        torch.manual_seed(5)
        parametrizations.spectral_norm(layer, "weight_ih_l0")
    torchs_class = CELLS[cell][1]
    assert isinstance(ours, torchs_class) and issubclass(type(ours), CELLS[cell][0])
    assert repr(ours) == repr(theirs) and type(ours).__name__ == type(theirs).__name__
    assert parametrize.type_before_parametrizations(ours) is CELLS[cell][0]
    twins = [copy.deepcopy(layer).eval() for layer in (ours, theirs)]
    assert_same(*(flat(twin(x)) for twin in twins))
    if cell == "lstm":  # which parametrizations are there is no matter of the cell
        compiled = torch.compile(twins[0], fullgraph=True, backend="aot_eager")
        assert_same(flat(compiled(x)), flat(twins[1](x)))
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(ours)
    for name in ("weight_hh_l0", "weight_ih_l0"):
        parametrize.remove_parametrizations(ours, name)
    assert type(ours) is CELLS[cell][0] and isinstance(ours, torchs_class)


class Asking(torch.nn.Module):
    """As recurrent language models do: whether there is a c to carry depends on what the layer is. One class at a time:
    in compiled code torch compares with a tuple of classes by the type alone."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(I, H)

    def forward(self, x):
        if isinstance(self.rnn, torch.nn.LSTM):
            y, (h, c) = self.rnn(x)
            return y + h + c
        y, h = self.rnn(x)
        return y - h if isinstance(self.rnn, torch.nn.GRU) or isinstance(self.rnn, torch.nn.RNN) else x  # noqa: SIM101


@by_the_type
@cells
def test_compiled_code_gets_the_same_answer(fresh_dynamo, cell):
    ours, theirs, extra = CELLS[cell]
    model, twin = (Asking(functools.partial(kind, **extra)) for kind in (ours, theirs))
    model.load_state_dict(twin.state_dict())
    x = torch.randn(5, 2, I)
    expected = [twin(x)]
    assert_same([model(x)], expected, torch.float32)
    assert_same([torch.compile(model, fullgraph=True, backend="aot_eager")(x)], expected, torch.float32)
    for strict in (False, True):
        assert_same([torch.export.export(model, (x,), strict=strict).module()(x)], expected, torch.float32)


@by_the_type
def test_compiled_code_reads_the_class(fresh_dynamo):
    def name(layer, x):
        return layer(x)[0] if layer.__class__.__name__ == "Own" and type(layer) is Own else x

    own, x = Own(I, H), torch.randn(5, 2, I)
    torch.testing.assert_close(torch.compile(name, fullgraph=True, backend="eager")(own, x), own(x)[0])


def test_initialisers():
    """torch.nn.Module.apply with functions that look for torch's layers, or for their names."""
    model = torch.nn.Sequential(weft.nn.LSTM(I, H), weft.nn.GRU(H, H), weft.nn.RNN(H, H))
    seen = []

    def initialise(module):
        if isinstance(module, torch.nn.LSTM):
            torch.nn.init.orthogonal_(module.weight_hh_l0)
            module.bias_ih_l0.data[H : 2 * H] = 1
            seen.append("LSTM")
        elif isinstance(module, (torch.nn.GRU, torch.nn.RNN)):
            seen.append(module.__class__.__name__)

    model.apply(initialise)
    assert seen == ["LSTM", "GRU", "RNN"]
    assert torch.equal(model[0].bias_ih_l0[H : 2 * H], torch.ones(H))

    @functools.singledispatch
    def kind(module):
        return "other"

    kind.register(torch.nn.GRU, lambda module: "GRU")
    assert [kind(module) for module in model] == ["other", "GRU", "other"]


def test_replicas():
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where DataParallel puts what it is given
    layer = weft.nn.GRU(I, H, device=device)
    replica = layer._replicate_for_data_parallel()  # what DataParallel makes on each device
    assert type(replica) is weft.nn.GRU and isinstance(replica, torch.nn.GRU)
    x = torch.randn(5, 2, I, device=device)
    assert torch.equal(torch.nn.DataParallel(layer)(x)[0], layer(x)[0])


@pytest.fixture
def process_group():
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_distributed(process_group, kind):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    ours, theirs = getattr(weft.nn, kind), getattr(torch.nn, kind)
    plain, x = ours(I, H), torch.randn(5, 2, I)
    expected = flat(plain(x))
    plain(x)[0].sum().backward()
    parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    sharded = fully_shard(copy.deepcopy(plain), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    assert isinstance(sharded, FSDPModule) and isinstance(sharded, ours) and isinstance(sharded, theirs)
    assert type(sharded).__name__ == f"FSDP{kind}"
    for layer in (parallel, sharded):
        layer.zero_grad()
        result = flat(layer(x))
        assert_same(result, expected, torch.float32)
        result[0].sum().backward()
        for got, want in zip(layer.parameters(), plain.parameters(), strict=True):
            got = got.grad.full_tensor() if layer is sharded else got.grad
            torch.testing.assert_close(got, want.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic_quantization_leaves_the_layers():
    """It goes by the exact class; of what is left alone the numbers stay, and nothing is half swapped."""
    model = torch.nn.Sequential(weft.nn.LSTM(I, H))
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.LSTM, torch.nn.Linear}, torch.qint8)
    assert type(quantized[0]) is weft.nn.LSTM
    x = torch.randn(5, 2, I)
    assert torch.equal(quantized(x)[0], model(x)[0])
