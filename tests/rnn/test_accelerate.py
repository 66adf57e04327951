"""weft.accelerate: what is swapped, what goes over, what is left alone."""

from __future__ import annotations

import abc
import copy
import pickle
import re
import warnings

import pytest
import torch
import weft
from torch.nn.utils import parametrize

from tests.common import DEVICES

PAIRS = [(torch.nn.RNN, weft.nn.RNN), (torch.nn.GRU, weft.nn.GRU), (torch.nn.LSTM, weft.nn.LSTM)]

devices = pytest.mark.parametrize("device", DEVICES)
pairs = pytest.mark.parametrize(("theirs", "ours"), PAIRS)


class Model(torch.nn.Module):
    """A layer by itself, one in a container, one that stands twice, and a None."""

    def __init__(self, kind):
        super().__init__()
        self.embed = torch.nn.Linear(3, 4)
        self.first = kind(4, 4, num_layers=2)
        self.stack = torch.nn.ModuleList([kind(4, 4), torch.nn.ModuleDict({"deep": kind(4, 4, bias=False)})])
        self.again = self.first
        self.absent = None

    def forward(self, x):
        x = self.embed(x)
        for layer in (self.first, self.stack[0], self.stack[1]["deep"], self.again):
            x = layer(x)[0]
        return x


class Own(torch.nn.GRU):
    def forward(self, input, hx=None):
        output, h = super().forward(input, hx)
        return output + 1, h


@devices
@pairs
@pytest.mark.parametrize("algorithm", ["auto", "persistent"])
def test_model(theirs, ours, device, algorithm):
    model = Model(theirs).to(device, torch.float64)
    x = torch.randn(6, 2, 3, dtype=torch.float64, device=device)
    before = model(x)
    grads = torch.autograd.grad(before.sum(), list(model.parameters()))
    names = list(model.state_dict())
    parameters = list(model.parameters())
    assert weft.accelerate(model, algorithm=algorithm) is model
    assert type(model.first) is type(model.stack[0]) is type(model.stack[1]["deep"]) is ours
    assert model.again is model.first and model.absent is None and type(model.embed) is torch.nn.Linear
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    after = model(x)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(torch.autograd.grad(after.sum(), list(model.parameters())), grads)


@pairs
def test_bare_layer(theirs, ours):
    layer = theirs(3, 4, 2, batch_first=True, dropout=0.25, bidirectional=True)
    result = weft.accelerate(layer)
    assert type(result) is ours and type(layer) is theirs
    assert repr(result) == repr(layer)[:-1] + ", accelerated=True)"
    assert all(a is b for a, b in zip(result.parameters(), layer.parameters(), strict=True))
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(result.eval()(x)[0], layer.eval()(x)[0])


def test_algorithm_keyword():
    model = weft.accelerate(Model(torch.nn.GRU), algorithm="reference")
    assert model.first.algorithm == model.stack[0].algorithm == "reference"
    assert weft.accelerate(torch.nn.GRU(3, 4)).algorithm == "auto"


def test_refusals_leave_the_model_alone():
    model = Model(torch.nn.GRU)
    with pytest.raises(ValueError, match="unknown algorithm 'fast'"):
        weft.accelerate(model, algorithm="fast")
    with pytest.raises(TypeError, match=r"accelerate: model must be a torch\.nn\.Module, got list"):
        weft.accelerate([model])
    assert type(model.first) is torch.nn.GRU


def test_twice_is_once():
    model = weft.accelerate(Model(torch.nn.LSTM), algorithm="torch")
    first = model.first
    weft.accelerate(model)
    assert model.first is first and first.algorithm == "torch"
    assert weft.accelerate(first) is first


def test_subclasses_are_left_alone():
    model = torch.nn.Sequential(Own(3, 4), torch.nn.Bilinear(3, 3, 4), torch.nn.Linear(4, 4))
    kinds = [type(m) for m in model]
    with pytest.warns(UserWarning, match=r"left these layers as they are: 0 \(.*\.Own\) overrides forward$"):
        weft.accelerate(model)
    assert [type(m) for m in model] == kinds
    own = Own(3, 4)
    with pytest.warns(UserWarning, match=r"the model itself \(.*\.Own\) overrides forward$"):
        assert weft.accelerate(own) is own
    parametrize.register_parametrization(own, "weight_hh_l0", Scaled())
    with pytest.warns(UserWarning, match="overrides forward"):
        assert weft.accelerate(own, subclasses=True) is own
    assert isinstance(own, Own)


class OwnCell(torch.nn.LSTMCell):
    """Overrides nothing that runs."""


def test_subclasses_of_cells_are_left_alone():
    model = torch.nn.Sequential(OwnCell(3, 4))
    with pytest.warns(UserWarning, match=r"0 \(.*\.OwnCell\) is a subclass of torch.nn.LSTMCell$"):
        weft.accelerate(model, subclasses=True)
    assert type(model[0]) is OwnCell


def test_layers_inside_a_subclass_are_found():
    own = Own(3, 4)
    own.inner = torch.nn.LSTM(4, 4)
    with pytest.warns(UserWarning, match="overrides forward"):
        weft.accelerate(own)
    assert type(own) is Own and type(own.inner) is weft.nn.LSTM


class Mixin(abc.ABC):
    @abc.abstractmethod
    def zeros(self, batch): ...


class Named(Mixin, torch.nn.LSTM):
    """Adds to torch's layer and overrides nothing that runs."""

    limit = 7

    def __init__(self, size, label):
        super().__init__(size, size)
        self.label = label

    def zeros(self, batch):
        return torch.zeros(self.num_layers, batch, self.hidden_size)

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.label}"

    @property
    def capital(self):
        return self.label.upper()


class Longer(Named):
    def zeros(self, batch):
        return super().zeros(batch).add(1)


class Custom(torch.nn.RNNBase):
    def forward(self, x):
        return x


def test_what_was_left_and_why():
    class Wide(torch.nn.GRU):
        @property
        def bidirectional(self):
            return False

        @bidirectional.setter
        def bidirectional(self, value): ...

    class Checks(torch.nn.RNN):
        def check_input(self, input, batch_sizes): ...

        def __call__(self, *arguments): ...

    class Attributed(torch.nn.GRU):
        algorithm = "mine"

    model = torch.nn.ModuleDict({
        "named": Named(4, "a"), "own": Own(3, 4), "wide": Wide(3, 4), "checks": Checks(3, 4),
        "attributed": Attributed(3, 4), "custom": Custom("GRU", 3, 4), "plain": torch.nn.GRU(3, 4),
        "weft": weft.nn.GRU(3, 4), "linear": torch.nn.Linear(3, 4),
    })  # fmt: skip
    with pytest.warns(UserWarning) as caught:
        weft.accelerate(model)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    module = __name__.rsplit(".", 1)[-1]
    for name, kind, why in (
        ("named", "Named", "is a subclass of torch.nn.LSTM: subclasses=True takes it"),
        ("own", "Own", "overrides forward"),
        ("wide", "Wide", "overrides bidirectional"),
        ("checks", "Checks", "overrides __call__, check_input"),
        ("attributed", "Attributed", "overrides algorithm"),
        ("custom", "Custom", "is none of torch.nn.RNN, GRU and LSTM"),
    ):
        assert re.search(rf"(: |; ){name} \([^;]*{module}\.[^;]*{kind}\) {re.escape(why)}(;|$)", text), (name, text)
    assert text.count(";") == 5
    with pytest.warns(UserWarning) as caught:
        weft.accelerate(model, subclasses=True)
    assert str(caught[0].message).count(";") == 4 and "named" not in str(caught[0].message)
    assert issubclass(type(model["named"]), weft.nn.LSTM) and type(model["plain"]) is weft.nn.GRU
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weft.accelerate(torch.nn.Sequential(torch.nn.GRU(3, 4), weft.nn.GRU(4, 4), torch.nn.Linear(4, 4)))
        weft.accelerate(torch.nn.Sequential(Named(4, "a")), subclasses=True)


@pytest.mark.parametrize("kind", [Named, Longer])
def test_subclasses(fresh_dynamo, kind):
    model = torch.nn.Sequential(kind(4, "label"))
    twin, x = copy.deepcopy(model[0]), torch.randn(5, 2, 4)
    layer = weft.accelerate(model, algorithm="persistent", subclasses=True)[0]
    assert isinstance(layer, (kind, torch.nn.LSTM)) and isinstance(layer, kind) and isinstance(layer, weft.nn.LSTM)
    assert not issubclass(type(layer), torch.nn.LSTM) and type(layer).__name__ == kind.__name__
    assert type(layer) is type(weft.accelerate(kind(4, "other"), subclasses=True))
    assert layer.algorithm == "persistent" and layer.limit == 7 and layer.capital == "LABEL"
    assert torch.equal(layer.zeros(3), twin.zeros(3))
    assert repr(layer) == repr(twin)  # by super() of the subclass
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert type(each) is type(layer) and each.label == "label"
        torch.testing.assert_close(each(x)[0], twin(x)[0])
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x)[0], twin(x)[0])
    parametrize.register_parametrization(twin, "weight_hh_l0", Scaled())
    result = weft.accelerate(torch.nn.Sequential(twin), subclasses=True)[0]
    assert type(result).__bases__ == (type(layer),) and isinstance(result, kind)
    torch.testing.assert_close(result(x)[0], twin(x)[0])
    parametrize.remove_parametrizations(result, "weight_hh_l0")
    assert type(result) is type(layer)


@devices
@pairs
def test_optimizer_goes_on(theirs, ours, device):
    model = torch.nn.Sequential(theirs(3, 4)).to(device)
    twin = copy.deepcopy(model)
    x = torch.randn(5, 2, 3, device=device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(3):
        if step == 1:
            weft.accelerate(model)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x)[0].pow(2).sum().backward()
            optimizer.step()
    assert type(model[0]) is ours
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@devices
@pairs
def test_state_of_the_module(theirs, ours, device):
    layer = theirs(3, 4, 2, device=device).eval()
    layer.weight_hh_l0.requires_grad_(False)
    layer.note = {"a": 1}
    layer.register_buffer("seen", torch.ones(2, device=device))
    layer.extra = torch.nn.Linear(2, 2)
    layer.weight_ih_l0.grad = torch.zeros_like(layer.weight_ih_l0)
    result = weft.accelerate(torch.nn.Sequential(layer))[0]
    assert not result.training and result.note is layer.note
    assert result.seen is layer.seen and result.extra is layer.extra
    assert not result.weight_hh_l0.requires_grad and result.weight_ih_l0.requires_grad
    assert result.weight_ih_l0.grad is layer.weight_ih_l0.grad
    result.train()
    assert result.training and result.extra.training
    result.to(torch.float64)
    assert result(torch.randn(5, 2, 3, dtype=torch.float64, device=device))[0].dtype == torch.float64


@pairs
def test_hooks(theirs, ours):
    layer = theirs(3, 4)
    calls = []

    def record(name):
        return lambda *arguments, **_: calls.append((name, arguments[0]))

    handles = [
        layer.register_forward_pre_hook(record("forward_pre")),
        layer.register_forward_hook(record("forward")),
        layer.register_full_backward_pre_hook(record("backward_pre")),
        layer.register_full_backward_hook(record("backward")),
        layer.register_state_dict_pre_hook(record("state_dict_pre")),
        layer.register_state_dict_post_hook(record("state_dict")),
        layer.register_load_state_dict_pre_hook(record("load_state_dict_pre")),
        layer.register_load_state_dict_post_hook(record("load_state_dict")),
    ]
    model = weft.accelerate(torch.nn.Sequential(layer))
    del layer
    x = torch.randn(5, 2, 3, requires_grad=True)
    # A backward hook wraps the module's results, which an LSTM nests.
    output = model(x)[0]
    output.sum().backward()
    model.load_state_dict(model.state_dict())
    names = ["forward_pre", "forward", "backward_pre", "backward"]
    names += ["state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict"]
    assert [name for name, _ in calls] == names
    assert all(module is model[0] for _, module in calls)
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x)[0].sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == []


class Scaled(torch.nn.Module):
    def forward(self, weight):
        return weight * 3

    def right_inverse(self, weight):
        return weight / 3


@devices
@pairs
def test_parametrizations(theirs, ours, device):
    layer = theirs(3, 4, device=device, dtype=torch.float64)
    parametrize.register_parametrization(layer, "weight_hh_l0", Scaled())
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_ih_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64, device=device)
    names = list(layer.state_dict())
    model = weft.accelerate(torch.nn.Sequential(layer))
    result = model[0]
    assert isinstance(result, ours) and parametrize.is_parametrized(result, "weight_hh_l0")
    assert [n.removeprefix("0.") for n in model.state_dict()] == names
    for _ in range(2):
        torch.testing.assert_close(result(x)[0], layer(x)[0])
        with torch.no_grad():
            layer.parametrizations.weight_hh_l0.original.mul_(-1)
    before = result(x)[0]
    parametrize.remove_parametrizations(result, "weight_hh_l0")
    parametrize.remove_parametrizations(result, "weight_ih_l0")
    assert type(result) is ours
    torch.testing.assert_close(result(x)[0], before)


@devices
@pairs
def test_old_weight_norm(theirs, ours, device):
    layer = theirs(3, 4, device=device, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    with pytest.warns(FutureWarning):
        for each in (layer, twin):
            torch.nn.utils.weight_norm(each, "weight_hh_l0")
    x = torch.randn(5, 2, 3, dtype=torch.float64, device=device)
    result = weft.accelerate(torch.nn.Sequential(layer))[0]
    assert type(result) is ours
    for _ in range(2):
        torch.testing.assert_close(result(x)[0], twin(x)[0])
        with torch.no_grad():
            result.weight_hh_l0_g.mul_(2), twin.weight_hh_l0_g.mul_(2)
    torch.nn.utils.remove_weight_norm(result, "weight_hh_l0")
    assert "weight_hh_l0" in dict(result.named_parameters())


@pairs
def test_tied_weights(theirs, ours):
    model = torch.nn.Sequential(theirs(4, 4), theirs(4, 4))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    weft.accelerate(model)
    assert type(model[0]) is type(model[1]) is ours
    assert model[0].weight_hh_l0 is model[1].weight_hh_l0
    with torch.no_grad():
        model[0].weight_hh_l0.zero_()
    assert model[1](torch.randn(5, 2, 4))[0].shape == (5, 2, 4)
    assert all(w is p for w, p in zip(model[1]._current_weights(), model[1].parameters(), strict=True))


def test_checkpoint_of_the_torch_model_loads():
    state = Model(torch.nn.LSTM).state_dict()
    model = weft.accelerate(Model(torch.nn.LSTM))
    assert not model.load_state_dict(state).missing_keys


@pairs
def test_restore_undoes_it(theirs, ours):
    model = Model(theirs).double()
    x, kept = torch.randn(6, 2, 3).double(), weft.nn.GRU(3, 4)
    model.kept = kept
    before, shown, parameters = model(x), repr(model), list(model.parameters())
    weft.accelerate(model, algorithm="persistent")
    assert type(model.first) is ours and "accelerated=True" in repr(model)
    assert weft.restore(model) is model
    assert type(model.first) is type(model.stack[0]) is theirs and model.again is model.first
    assert model.kept is kept and repr(model) == shown
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not {"_algorithm", "_accelerated"} & model.first.__dict__.keys()
    torch.testing.assert_close(model(x), before)
    assert type(weft.accelerate(model).first) is ours
    bare = theirs(3, 4)
    assert type(weft.restore(weft.accelerate(bare))) is theirs and weft.restore(bare) is bare
    with pytest.raises(TypeError, match=r"restore: model must be a torch\.nn\.Module, got list"):
        weft.restore([model])


def test_restore_keeps_parametrizations_and_subclasses():
    layer = torch.nn.GRU(3, 4)
    parametrize.register_parametrization(layer, "weight_hh_l0", Scaled())
    x = torch.randn(5, 2, 3)
    before = layer(x)[0]
    ours = weft.accelerate(layer)
    back = weft.restore(ours)
    assert isinstance(back, torch.nn.GRU) and parametrize.is_parametrized(back, "weight_hh_l0")
    torch.testing.assert_close(back(x)[0], before)


def test_verbose_says_what_was_swapped(capsys):
    model = Model(torch.nn.GRU)
    weft.accelerate(model, verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert "weft.accelerate: first: torch.nn.GRU -> weft.nn.GRU" in lines and len(lines) == 3
    weft.accelerate(model, verbose=True)
    assert capsys.readouterr().out == "weft.accelerate: nothing swapped\n"
    weft.accelerate(torch.nn.LSTM(3, 4), verbose=True)
    assert "the model itself: torch.nn.LSTM -> weft.nn.LSTM" in capsys.readouterr().out


def test_nothing_to_swap_is_a_warning():
    with pytest.warns(UserWarning, match="swapped nothing: Linear has no torch.nn.RNN, GRU"):
        weft.accelerate(torch.nn.Linear(3, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weft.accelerate(torch.nn.Sequential(weft.nn.GRU(3, 4)))


def test_scripted_layers_are_named():
    model = torch.nn.ModuleDict({"old": torch.jit.script(torch.nn.GRU(3, 4)), "new": torch.nn.GRU(3, 4)})
    with pytest.warns(UserWarning, match=r"old \(.*\) is compiled by torch.jit.script: accelerate the model before"):
        weft.accelerate(model)
    assert type(model["new"]) is weft.nn.GRU
