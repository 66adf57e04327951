"""Mistakes that people make, one test each, by the message: it names what was called, the argument, and what to do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import weft
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from weft import Graphs
from weft.nn import GRU, LRU, LSTM, RGLRU, RNN, S5, SLSTM, MinGRU, MinLSTM, ParaGRU, ParaLSTM
from weft.scan import ScanSequential, chain_backward, linear_scan, pointwise_scan

LAYERS = {kind.__name__: kind for kind in (RNN, GRU, LSTM, SLSTM, MinGRU, MinLSTM, RGLRU, LRU, S5, ParaGRU, ParaLSTM)}
CELLS = {name: getattr(weft.nn, name) for name in ("RNNCell", "GRUCell", "LSTMCell", "SLSTMCell")}
BOTH = {**LAYERS, **CELLS}
TORCHS = ("RNN", "GRU", "LSTM", "SLSTM")
"""Whose exceptions are of torch's types."""


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        call()
    text = str(caught.value)
    assert "CppNode" not in text and "Could not run" not in text and "_Min" not in text


# ---- Layers and cells ------------------------------------------------------------------------------------------------

every = pytest.mark.parametrize("name", BOTH)
layers = pytest.mark.parametrize("name", LAYERS)
cells = pytest.mark.parametrize("name", CELLS)


@every
def test_a_misspelt_keyword(name):
    refused(
        lambda: BOTH[name](4, 8, hiden_size=8), rf"^{name}: unexpected argument 'hiden_size'; did you mean 'hidden_"
    )
    refused(lambda: BOTH[name](4, 8, colour=1), rf"^{name}: unexpected argument 'colour'; it takes input_size, hidden_")


@every
def test_a_missing_size(name):
    if name == "RGLRU":  # whose hidden_size is the input's by default
        refused(lambda: RGLRU(), "^RGLRU: input_size must be an int, got NoneType")
    else:
        refused(lambda: BOTH[name](4), f"^{name}: hidden_size is missing")


@every
def test_a_size_that_is_no_int(name):
    refused(lambda: BOTH[name](4, 8.0), rf"^{name}: hidden_size .* int,? got:? float")


@layers
def test_a_size_of_zero(name):
    refused(lambda: LAYERS[name](4, 0), rf"^{name}: hidden_size must be (positive|greater than zero)")


@every
def test_too_many_arguments(name):
    kind = BOTH[name]
    arguments = (4, 8, 1, "tanh") if name == "RNN" else (4, 8, 1)
    refused(
        lambda: kind(*arguments, *[True] * 9), rf"^{name}: takes \d+ arguments without their names at most, got 1[1-3]$"
    )


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM", *CELLS])
def test_every_argument_by_position(name):
    """As torch's class takes them."""
    options = {"RNN": (1, "relu", True, False, 0.0, False, 0), "RNNCell": (True, "relu")}
    options.update(dict.fromkeys(("GRU", "LSTM"), (1, True, False, 0.0, False, 0)), SLSTMCell=(2, "exp", True))
    arguments = (4, 8, *options.get(name, (True,)), None, torch.float64)
    layer = BOTH[name](*arguments)
    assert layer.weight_ih.dtype == torch.float64 if name in CELLS else layer.weight_ih_l0.dtype == torch.float64
    if name != "SLSTMCell":
        same = getattr(nn, name)(*arguments)
        layer.load_state_dict(same.state_dict())
        assert repr(layer) == repr(same)
        torch.testing.assert_close(layer(x(2, 4).double()), same(x(2, 4).double()))
        with pytest.raises(TypeError):
            getattr(nn, name)(*arguments, None)
    refused(
        lambda: BOTH[name](*arguments, None), f"^{name}: takes {len(arguments)} arguments .* got {len(arguments) + 1}$"
    )


@every
def test_an_unknown_algorithm(name):
    known = "unexpected argument 'algorithm'" if name in ("MinGRU", "MinLSTM", "RGLRU", "LRU", "S5") else ".*'auto'"
    refused(lambda: BOTH[name](4, 8, algorithm="fast"), rf"^{name}: {known}")


@layers
def test_input_of_another_width(name):
    refused(lambda: LAYERS[name](4, 8)(x(5, 2, 3)), rf"^{name}: input.*\(T, B, 4\).*batch_first is False")


@layers
def test_input_of_another_rank(name):
    refused(lambda: LAYERS[name](4, 8)(x(1, 5, 2, 4)), rf"^{name}: .*\(T, B, 4\)")


@every
@pytest.mark.parametrize(
    "wrong",
    [(torch.zeros(5, 2, 4),), [0.0], None, torch.zeros(5, 2, 4).numpy()],
    ids=lambda value: type(value).__name__,
)
def test_input_that_is_no_tensor(name, wrong):
    refused(lambda: BOTH[name](4, 8)(wrong), rf"^{name}: input must be a Tensor.*got {type(wrong).__name__}")


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_input_of_another_dtype(name, dtype):
    shape = (2, 4) if name in CELLS else (5, 2, 4)
    refused(
        lambda: BOTH[name](4, 8)(x(*shape).to(dtype)), rf"^{name}: .*({dtype}.*torch\.float32|torch\.float32.*{dtype})"
    )


@every
def test_input_on_another_device(name):
    shape = (2, 4) if name in CELLS else (5, 2, 4)
    refused(
        lambda: BOTH[name](4, 8)(x(*shape).to("meta")), rf"^{name}: input must be on the \w+' device, cpu, got meta"
    )


@layers
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_input(name, layout):
    nested = torch.nested.nested_tensor([x(5, 4), x(3, 4)], layout=layout)
    instead = "to_padded_tensor" if name.startswith("Para") else r"pack_sequence\(input.unbind\(\), enforce_sorted=F"
    refused(lambda: LAYERS[name](4, 8)(nested), rf"^{name}: input is a NestedTensor.*{instead}")


@layers
def test_a_sparse_input(name):
    refused(lambda: LAYERS[name](4, 8)(x(5, 2, 4).to_sparse()), rf"^{name}: input is sparse.*input.to_dense\(\)")


@layers
def test_a_state_of_another_batch(name):
    layer = LAYERS[name](4, 8)
    state = {"LSTM": (x(1, 3, 8),) * 2, "SLSTM": (x(1, 3, 8),) * 4, "ParaLSTM": (x(3, 8),) * 2}.get(name, x(1, 3, 8))
    refused(lambda: layer(x(5, 2, 4), state), rf"^{name}: .*(batch_first is False|\(B, H\))")


@layers
def test_a_state_of_the_other_kind(name):
    layer = LAYERS[name](4, 8)
    if name in ("LSTM", "SLSTM", "ParaLSTM"):
        refused(lambda: layer(x(5, 2, 4), x(1, 2, 8)), rf"^{name}: hx must be a tuple \(h.*got")
    else:
        refused(lambda: layer(x(5, 2, 4), (x(1, 2, 8),) * 2), rf"^{name}: (hx|h_0) must be a Tensor.*got tuple")


STATES = {"LSTM": 2, "SLSTM": 4, "ParaLSTM": 2, "LSTMCell": 2, "SLSTMCell": 4}


def with_state(name: str, change: Callable[[torch.Tensor], torch.Tensor], steps: int = 5, **options: object) -> object:
    """A call whose states are changed ones of zeros."""
    shape = (2, 8) if name in CELLS or name.startswith("Para") else (1, 2, 4 if name == "S5" else 8)
    state = change(x(*shape).to(torch.complex64 if name in ("LRU", "S5") else torch.float32))
    count = STATES.get(name, 1)
    given = x(2, 4) if name in CELLS else x(steps, 2, 4)
    return BOTH[name](4, 8, **options)(given, state if count == 1 else (state,) * count)


@every
@pytest.mark.parametrize("steps", [5, 1])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_state_that_is_not_like_the_input(name, steps):
    """On another device, of another dtype, nested or sparse."""
    states = r"(hx|h|h0|h_0|hidden)(\[0\])?"
    refused(lambda: with_state(name, lambda s: s.to("meta"), steps), rf"^{name}: {states} must be on .* cpu, got meta")
    refused(
        lambda: with_state(name, lambda s: s.to(torch.float64), steps), rf"^{name}: {states} must .*got torch.float64"
    )
    refused(
        lambda: with_state(name, lambda s: torch.nested.nested_tensor(list(s)), steps),
        rf"^{name}: {states} is a Nested",
    )
    if name != "RNNCell":  # torch's takes it
        refused(lambda: with_state(name, torch.Tensor.to_sparse, steps), rf"^{name}: {states} is sparse \(sparse_coo\)")
    if name in CELLS:
        for algorithm in ("auto", "torch"):
            options = {"num_heads": 2, "algorithm": algorithm}
            for change, message in (
                (lambda s: s.to("meta"), "must be on the input's device, cpu, got meta"),
                (lambda s: s.double(), "must have the input's dtype, torch.float32, got torch.float64"),
                (lambda s: s[:1], r"must be \(2, 8\), to go with input \(2, 4\), got \(1, 8\)"),
                (torch.Tensor.to_sparse, "is sparse"),
            ):
                refused(lambda: with_state(name, change, **options), rf"^{name}: {states} {message}")  # noqa: B023


def test_a_layout_of_its_own():
    refused(lambda: GRU(4, 8)(x(5, 2, 4).to_mkldnn()), r"^GRU: input has the layout _mkldnn, .*input.to_dense\(\)")


@pytest.mark.parametrize("name", ["LSTMCell", "SLSTMCell"])
@pytest.mark.parametrize("empty", [(), []])
def test_no_states_at_all(name, empty):
    refused(
        lambda: CELLS[name](4, 8)(x(2, 4), empty), rf"^{name}: hx must be \(h, c.*, a tuple of Tensors, got 0 of them"
    )


@cells
def test_sizes_of_a_cell_may_be_anothers_ints(name):
    class Size:
        def __index__(self):
            return 8

    cell = CELLS[name](4, Size())
    assert cell.hidden_size == 8 and type(cell.hidden_size) is int
    cell(x(2, 4))


@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM", "RGLRU", "LRU", "S5"])
def test_a_warning_points_at_the_call(name):
    with pytest.warns(UserWarning, match=f"^{name}: dropout acts between layers") as caught:
        LAYERS[name](4, 8, dropout=0.5)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("name", "states"), [("LSTM", 1), ("SLSTM", 2), ("ParaLSTM", 1), ("SLSTMCell", 2)])
def test_too_few_states(name, states):
    layer = BOTH[name](4, 8)
    shape = (2, 4) if name in CELLS else (5, 2, 4)
    refused(lambda: layer(x(*shape), (x(1, 2, 8),) * states), rf"^{name}: hx must be .*\(h.*got {states}")


@every
def test_an_argument_that_the_call_has_not(name):
    refused(
        lambda: BOTH[name](4, 8)(x(5, 2, 4), h0=None), rf"^{name}.forward\(\) got an unexpected keyword argument 'h0'"
    )


@pytest.mark.parametrize("name", TORCHS)
def test_no_time_step(name):
    refused(lambda: LAYERS[name](4, 8)(x(0, 2, 4)), f"^{name}: input must have at least one time step, got none")


@pytest.mark.parametrize("name", ["MinGRU", "LRU"])
def test_a_state_of_another_dtype(name):
    state = x(1, 2, 8).double()
    refused(
        lambda: LAYERS[name](4, 8)(x(5, 2, 4), state), rf"^{name}: hx must be .*as the states are, got torch.float64"
    )


def test_the_third_argument_of_a_scan_layer():
    refused(
        lambda: MinGRU(4, 8, True), "^MinGRU: num_layers must be an int, got bool; the third argument is num_layers"
    )


@every
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripting(name):
    refused(lambda: torch.jit.script(BOTH[name](4, 8)), rf"^{name}: torch.jit.script cannot compile.*torch.compile")


@cells
def test_input_of_a_cell_that_does_not_fit(name):
    refused(lambda: CELLS[name](4, 8)(x(2, 3)), rf"^{name}: input must have 4 features, input_size, got \(2, 3\)")
    refused(lambda: CELLS[name](4, 8)(x(5, 2, 4)), rf"^{name}: input must be \(B, 4\) or \(4\)")


@cells
def test_a_state_of_a_cell_that_does_not_fit(name):
    count = {"LSTMCell": 2, "SLSTMCell": 4}.get(name, 1)
    state = (x(3, 8),) * count if count > 1 else x(3, 8)
    refused(
        lambda: CELLS[name](4, 8)(x(2, 4), state), rf"^{name}: hx? must be \(2, 8\), to go with input \(2, 4\), got \(3"
    )
    other = x(2, 8) if count > 1 else (x(2, 8),)
    wanted = r"hx must be \(h, c" if count > 1 else "hx must be a Tensor, got tuple"
    refused(lambda: CELLS[name](4, 8)(x(2, 4), other), rf"^{name}: {wanted}")


@pytest.mark.parametrize("name", ["GRU", "SLSTM", "SLSTMCell", "GRUCell"])
def test_heads_that_do_not_divide(name):
    refused(lambda: BOTH[name](4, 8, num_heads=3), rf"^{name}: num_heads must divide hidden_size 8, got 3")
    refused(lambda: BOTH[name](4, 8, num_heads=2.0), rf"^{name}: num_heads must be an int, got float")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SLSTM(4, 8, forget_gate="tanh"), "^SLSTM: forget_gate must be 'sigmoid' or 'exp', got 'tanh'"),
        (lambda: S5(4, 8, state_size=7), r"^S5: state_size must be a multiple of 2 \* blocks = 2, got 7"),
        (lambda: LRU(4, 8, r_min=2.0), "^LRU: r_min and r_max must be 0 <= r_min < r_max <= 1, got 2.0 and 1.0"),
        (lambda: RGLRU(9, blocks=2), "^RGLRU: blocks must divide hidden_size 9, got 2"),
        (lambda: MinGRU(4, 8, activation="relu"), "^MinGRU: activation must be 'identity' or 'g', got 'relu'"),
        (lambda: ParaGRU(4, 6, blocks=4), "^ParaGRU: blocks must divide input_size 4 and hidden_size 6, got 4"),
        (lambda: GRU(4, 8, proj_size=2), "^GRU: proj_size argument is only supported for LSTM"),
        (lambda: RNN(4, 8, nonlinearity="sin"), "^RNN: nonlinearity must be 'tanh' or 'relu', got 'sin'"),
        (lambda: GRU(4, 8, dropout=2.0), "^GRU: dropout should be a number in range"),
        (lambda: LSTM(4, 8, batch_first=1), "^LSTM: batch_first should be of type bool, got: int"),
    ],
)
def test_options_of_layers(call, message):
    refused(call, message)


# ---- In-place changes ------------------------------------------------------------------------------------------------


def _output(name: str) -> torch.Tensor:
    """The result of what saves it for backward."""
    a = torch.rand(5, 2, 4, requires_grad=True)
    if name in LAYERS:
        return LAYERS[name](4, 8)(a)[0]
    if name in CELLS:
        found = CELLS[name](4, 8)(a[0])
        return found if isinstance(found, torch.Tensor) else found[0]
    if name == "linear_scan":
        return linear_scan(a, a)
    return pointwise_scan(lambda h, x, p: torch.tanh(h + x), a[0], a)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        *((name, f"weft.nn.{name}") for name in (*TORCHS, *CELLS, "ParaGRU", "ParaLSTM")),
        *((name, "weft.scan.linear_scan") for name in ("MinGRU", "MinLSTM", "RGLRU", "linear_scan")),
        ("pointwise_scan", "weft.scan.pointwise_scan"),
    ],
)
def test_a_result_that_is_changed_before_backward(name, named):
    y = _output(name)
    y.mul_(2)
    refused(
        lambda: y.sum().backward(), rf"^{named}: one of the variables needed .* which is output \d of {named}, is at v"
    )


def test_another_operators_result_that_is_changed_before_backward():
    y = _output("linear_scan")
    z = GRU(4, 8)(y)[0]
    with torch.no_grad():
        y.mul_(2)
    refused(lambda: z.sum().backward(), r"^weft.nn.GRU: .* is output 0 of another operator of Weft, is at version 1")


def test_an_input_of_a_vertex_function_that_is_changed_before_backward():
    leaf = torch.rand(3, 4, requires_grad=True)
    pulled = leaf * 1
    out = Cell()(GRAPHS, pulled)
    pulled.mul_(2)
    refused(lambda: out.sum().backward(), r"^weft.VertexFunction: one of the variables needed .* is at version 1")


def test_backward_twice():
    y = GRU(4, 8)(x(5, 2, 4))[0].sum()
    y.backward()
    refused(y.backward, r"^weft.nn.GRU: Trying to backward through the graph a second time.*retain_graph=True")


# ---- accelerate, explain, tune ---------------------------------------------------------------------------------------

GRAPHS = Graphs.from_children([[[], [], [0, 1]]])


class Cell(weft.VertexFunction):
    def __init__(self, function=None):
        super().__init__(state_size=4)
        self.W, self.function = nn.Linear(4, 4), function

    def vertex(self, v):
        h = torch.tanh(self.W(v.pull()) + v.gather_sum()) if self.function is None else self.function(v)
        v.scatter(h)
        v.push(h)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weft.accelerate(nn.GRU), "^accelerate: model must be a torch.nn.Module, got type"),
        (lambda: weft.accelerate(nn.GRU(4, 8), algorithm="fast"), "^accelerate: unknown algorithm 'fast'; known are"),
        (lambda: weft.restore([]), "^restore: model must be a torch.nn.Module, got list"),
        (lambda: weft.explain(GRU(4, 8)), r"^explain: the input of GRU is missing: weft.explain\(layer, x\)"),
        (lambda: weft.explain(MinGRU(4, 8)), r"^explain: the input of MinGRU is missing: weft.explain\(layer, x\)"),
        (lambda: weft.explain(nn.Linear(4, 8)), r"^explain: the input of Linear is missing: weft.explain\(model, x\)"),
        (lambda: weft.explain(x(5, 2, 4), GRU(4, 8)), "^explain: what to explain comes first, .*; got Tensor"),
        (lambda: weft.explain(GRU(4, 8), (x(5, 2, 4),)), "^explain: x must be a Tensor or a PackedSequence, got tuple"),
        (lambda: weft.explain(GRU(4, 8), x(5, 2, 3)), "^GRU: .*Expected 4, got 3"),
        (lambda: weft.explain(MinGRU(4, 8), x(5, 2, 3)), r"^MinGRU: input must be \(T, B, 4\)"),
        (lambda: weft.explain(ParaGRU(4, 8), (x(5, 2, 4),)), "^ParaGRU: input must be a Tensor, got tuple"),
        (lambda: weft.explain(weft.nn.GRUCell(4, 8), x(2, 3)), "^GRUCell: input must have 4 features"),
        (
            lambda: weft.explain(linear_scan, x(5, 2, 4)),
            r"^explain: missing .* 'b'; call weft.explain\(weft.scan.linear_",
        ),
        (lambda: weft.explain(linear_scan, (5, 2, 4), (5, 2, 4)), "^explain: A must be a Tensor, got tuple"),
        (lambda: weft.explain(pointwise_scan), r"^explain: missing .* 'step'; call weft.explain\(weft.scan.pointwise_"),
        (lambda: weft.explain(Cell()), r"^explain: missing .* 'graphs'; call weft.explain\(cell, graphs, inputs\)"),
        (lambda: weft.explain(ScanSequential(nn.ReLU()), [1]), "^explain: x must be a Tensor, got list"),
        (lambda: weft.tune(nn.GRU(4, 8), x(5, 2, 4)), r"^tune: .* got torch.nn.GRU; weft.accelerate\(model\) puts"),
        (
            lambda: weft.tune(nn.Linear(4, 8), x(2, 4)),
            "^tune: layer must be a weft.nn.RNN, GRU, LSTM or SLSTM, got Linear",
        ),
        (lambda: weft.tune(GRU(4, 8), [x(5, 2, 4)]), "^tune: x must be a Tensor or a PackedSequence, got list"),
    ],
)
def test_accelerate_explain_and_tune(call, message):
    refused(call, message)


def test_nothing_to_accelerate():
    with pytest.warns(UserWarning, match=r"weft.accelerate swapped nothing: Linear has no torch.nn.RNN, GRU, LSTM"):
        weft.accelerate(nn.Linear(4, 8))


# ---- Scans -----------------------------------------------------------------------------------------------------------

A, H0 = torch.rand(5, 2, 4), torch.zeros(2, 4)
J = [torch.zeros(3, 10, 5), torch.zeros(3, 20, 10)]  # transposed, last layer first


def step(h, x, p):
    return torch.tanh(h + x)


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


# ---- Graphs ----------------------------------------------------------------------------------------------------------

E = torch.tensor([[0, 1, 1], [2, 2, 3]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Graphs(), "^Graphs has no public constructor; use Graphs.from_children, from_parents, from_edges"),
        (lambda: Graphs.from_edges([E[:, [0, 0, 1, 2]]], [4]), r"^Graphs.from_edges: .*got \(2, 4\).*from_edge_index"),
        (
            lambda: Graphs.from_edges(E.T, [4]),
            r"^Graphs.from_edges: graph 0: edges must be a sequence .* \(3, 2\).*\(\[edges\], \[",
        ),
        (
            lambda: Graphs.from_edge_index(E, [4]),
            r"^Graphs.from_edge_index: graph 0: .* \(2, 3\); .*from_edge_index\(\[edge_index\]",
        ),
        (
            lambda: Graphs.from_edge_index([E], 4),
            "^Graphs.from_edge_index: num_vertices must be a sequence with an entry",
        ),
        (lambda: Graphs.from_edge_index([E.T], [4]), r"^Graphs.from_edge_index: graph 0.*\(2, edges\).*from_edges"),
        (
            lambda: Graphs.from_edge_index([E.flip(0)[:, [0, 0]].clone()], [2]),
            "^Graphs.from_edge_index: graph 0, vertex",
        ),
        (
            lambda: Graphs.from_children([[], [], [0, 1]]),
            "^Graphs.from_children: graph 0: .* there is one entry per graph",
        ),
        (
            lambda: Graphs.from_children([[[], [0.0]]]),
            "^Graphs.from_children: graph 0, vertex 1: expected integers, got fl",
        ),
        (
            lambda: Graphs.from_children([[[], [5]]]),
            "^Graphs.from_children: graph 0, vertex 1: child 5 is out of range for 2",
        ),
        (
            lambda: Graphs.from_children([[[1], [0]]]),
            "graph 0, vertex 0: lies on a cycle, as in an undirected graph.*PyTorch G",
        ),
        (
            lambda: Graphs.from_parents([2, 2, -1]),
            "^Graphs.from_parents: graph 0: parents must be a sequence of integers",
        ),
        (
            lambda: Graphs.from_edges([[[0, 1]]], 2),
            "^Graphs.from_edges: num_vertices must be a sequence with an entry per",
        ),
        (lambda: Graphs.from_edges([[[0, 2, 0], [1, 2, 0]]], [3]), "graph 0, vertex 2: two children in slot 0"),
        (lambda: Graphs.chain(3), "^Graphs.chain: lengths must be a sequence with an entry per graph, got int"),
        (lambda: Graphs.batch([[0]]), r"^Graphs.batch: graphs\[0\] must be a Graphs, got list"),
        (lambda: GRAPHS.with_types(["a"]), "^Graphs.with_types: 1 types for 3 vertices"),
        (lambda: GRAPHS.with_types("abc"), "^Graphs.with_types: types must be a sequence of names, got str"),
        (lambda: GRAPHS[7], "^Graphs: index 7 is out of range for 1 graphs"),
        (lambda: GRAPHS.to(torch.float16), "^Graphs.to: takes a device; the tensors of Graphs stay int64"),
        (
            lambda: Graphs.from_pyg(E),
            "^Graphs.from_pyg: expected a torch_geometric Data or a sequence of them, got Tensor",
        ),
        (lambda: Graphs.from_dgl(E), "^Graphs.from_dgl: expected a DGLGraph or a sequence of them, got Tensor"),
        (
            lambda: Graphs.from_networkx(E),
            "^Graphs.from_networkx: expected a networkx.DiGraph or a sequence of them, got T",
        ),
    ],
)
def test_graphs(call, message):
    refused(call, message)


@pytest.mark.parametrize("make", [Graphs.from_edges, Graphs.from_edge_index])
@pytest.mark.parametrize("array", [lambda x: x, lambda x: x.numpy()])
def test_the_array_of_one_graph_is_a_value_error(array, make):
    with pytest.raises(ValueError, match=rf"^Graphs\.{make.__name__}: graph 0: .*of a single graph call"):
        make(array(torch.tensor([[0, 1], [1, 2]])), [3, 3])


def test_two_rows_may_be_an_edge_index():
    with pytest.warns(UserWarning, match=r"from_edges: graph 0: .*for an edge_index .* call Graphs.from_edge_index"):
        Graphs.from_edges([torch.tensor([[0, 1], [1, 2]])], [3])


# ---- Vertex functions ------------------------------------------------------------------------------------------------


class WithoutSize(weft.VertexFunction):
    def __init__(self):
        super().__init__("3")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WithoutSize(), "^WithoutSize: state_size must be an int or a sequence of ints, got '3'"),
        (lambda: weft.vertex.models.TreeLSTM(4, 8.0), "^TreeLSTM: state_size must be an int"),
        (lambda: weft.VertexFunction(4)(GRAPHS, x(3, 4)), r"^VertexFunction: vertex\(self, v\) is not implemented"),
        (
            lambda: Cell()(GRAPHS, x(3, 5)),
            r"^Cell: input 'input' has rows of shape \(5,\), torch.float32, and vertex comp",
        ),
        (lambda: Cell()(GRAPHS, x(3, 4).half()), "^Cell: input 'input' is torch.float16, the parameters are torch.f"),
        (lambda: Cell()(GRAPHS, x(2, 4)), "^Cell: input 'input' must have one row per vertex, 3 rows, got 2"),
        (lambda: Cell()(GRAPHS), "^Cell: vertex pulls input 'input', which is missing; inputs given: none"),
        (
            lambda: Cell()(GRAPHS, {"x": x(3, 4)}),
            "^Cell: vertex pulls input 'input', which is missing; inputs given: 'x'",
        ),
        (lambda: Cell()(x(3, 4), GRAPHS), "^Cell: graphs must be a weft.Graphs, got Tensor"),
        (lambda: Cell()(GRAPHS, (x(3, 4),)), "^Cell: inputs must be a tensor, got tuple"),
        (lambda: Cell()(GRAPHS, x(3, 4).to_sparse()), r"^Cell: input 'input' is sparse"),
        (
            lambda: Cell()(GRAPHS, x(3, 4), executor="fast"),
            "^Cell: executor must be one of 'auto', 'batched', 'reference'",
        ),
        (
            lambda: Cell(lambda v: v.gather(torch.tensor(0)))(GRAPHS, x(3, 4)),
            "^Cell: gather: the slot must be an int, got T",
        ),
        (
            lambda: Cell(lambda v: v.children)(GRAPHS, x(3, 4)),
            "^Cell: v has no 'children'; it has pull, pull_edges, gather",
        ),
        (
            lambda: Cell(lambda v: v.gather_sum(3))(GRAPHS, x(3, 4)),
            "^Cell: gather_sum: message must be callable, got int",
        ),
        (lambda: Cell(lambda v: None)(GRAPHS, x(3, 4)), "^Cell: what vertex scatters must be a tensor, got NoneType"),
        (
            lambda: Cell(lambda v: v.pull()[:, :2])(GRAPHS, x(3, 4)),
            r"^Cell: vertex scatters rows of shape \(2,\), state_s",
        ),
        (
            lambda: Cell(lambda v: v.pull() if v.pull().sum() > 0 else v.gather_sum())(GRAPHS, x(3, 4)),
            "^Cell: control flow or a Python number depends on a value.*torch.where",
        ),
        (
            lambda: Cell(lambda v: v.gather(0))(GRAPHS),
            "^Cell: graph 0, vertex 2: there is a child in slot 1, vertex ga",
        ),
        (lambda: weft.vertex.models.RvNN(4, 8)(GRAPHS, x(3, 4)), "^RvNN: graphs have no types.*Graphs.with_types"),
        (lambda: weft.VertexFunctions([Cell()]), "^VertexFunctions: functions must be a mapping, got list"),
        (lambda: Cell().program, "^Cell: there is no program before the first call"),
    ],
)
def test_vertex_functions(call, message):
    refused(call, message)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripting_a_vertex_function():
    refused(
        lambda: torch.jit.script(Cell()), "^Cell: torch.jit.script cannot compile.*a vertex function compiles itself"
    )


CELL = Cell()
SGD = torch.optim.SGD(CELL.parameters(), 0.1)
CLASSES = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda T: T(nn.Linear(3, 3), SGD), "^Trainer: cell must be a VertexFunction or VertexFunctions, got Linear"),
        (lambda T: T(CELL, torch.optim.SGD), "^Trainer: optimizer must be a torch.optim.Optimizer, got type"),
        (lambda T: T(CELL, SGD, "ce"), "^Trainer: loss must be one of 'cross_entropy', 'mse', got 'ce'"),
        (lambda T: T(CELL, SGD, at="root"), "^Trainer: at must be one of 'vertices', 'roots', got 'root'"),
        (lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), [0]), "^Trainer: targets must be a tensor, got list"),
        (
            lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), CLASSES[:2]),
            r"^Trainer: targets must be \(3,\), a row per vertex, got",
        ),
        (
            lambda T: T(CELL, SGD).step(GRAPHS, x(3, 4), x(3)),
            "^Trainer: targets must be classes, torch.int64, got torch.fl",
        ),
        (
            lambda T: T(CELL, SGD, at="roots").step(GRAPHS, x(3, 4), CLASSES),
            r"^Trainer: targets must be \(1,\), a row per ro",
        ),
        (
            lambda T: (t := T(CELL, SGD), t.step(GRAPHS, x(3, 4), CLASSES + 9), t.sync()),
            r"^Trainer: a target is not in \[0, 4",
        ),
        (
            lambda T: T(CELL, SGD, head=nn.Linear(5, 2)).step(GRAPHS, x(3, 4), CLASSES),
            r"^Trainer: the head takes 5 features, the cell pushes \(4,\)",
        ),
        (
            lambda T: weft.explain(T(CELL, SGD)),
            r"^explain: missing .* 'graphs'; call weft.explain\(trainer, graphs, inputs",
        ),
    ],
)
def test_trainer(call, message):
    refused(lambda: call(weft.vertex.Trainer), message)


# ---- Offload ---------------------------------------------------------------------------------------------------------


def _reentered() -> None:
    off = weft.offload(0, backend="reference")
    with off, off:
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weft.offload(buget="4GB"), "^offload: unexpected argument 'buget'; did you mean 'budget'"),
        (lambda: weft.offload("4 gigs"), "^offload: budget must be a number and a unit, B, KB, .* got '4 gigs'"),
        (lambda: weft.offload(1.5), "^offload: budget must be a whole number of bytes or a string like '4GB', got 1.5"),
        (lambda: weft.offload(True), "^offload: budget must be a whole number of bytes .* got True"),
        (lambda: weft.offload("4GB", "auto"), "^offload: takes 1 arguments without their names at most, got 2"),
        (
            lambda: weft.offload(backend="cpu"),
            "^offload: backend must be one of 'copy', 'managed', 'reference', got 'cpu'",
        ),
        (lambda: weft.offload(compress=True), "^offload: compress must be one of 'auto', 'zvc', 'rle', None, got True"),
        (lambda: weft.offload(keep_last=-1), "^offload: keep_last must not be negative, got -1"),
        (lambda: weft.offload(min_bytes=None), "^offload: min_bytes must be a whole number of bytes .* got None"),
        (
            lambda: weft.offload(step),
            r"^offload: budget comes first, got <function.*with parentheses: @weft.offload\(\)",
        ),
        (lambda: weft.offload()(nn.Linear), "^offload: decorates functions .* got <class"),
        (_reentered, "^offload: this thread is inside this object already; it is not re-entrant"),
        (lambda: weft.offload().plot("x.png"), "^offload: nothing to plot before the first use"),
        (lambda: weft.offload().__exit__(None, None, None), "^offload: this thread is not inside this object"),
    ],
)
def test_offload(call, message):
    refused(call, message)


def test_a_saved_tensor_that_is_changed_in_the_block():
    a = torch.randn(9, requires_grad=True)
    with weft.offload(0, backend="reference", min_bytes=0, keep_last=0):
        b = a.exp()
        loss = (b * b).sum()
    b.add_(1)
    refused(
        loss.backward, r"modified by an inplace operation: \[torch.FloatTensor \[9\]\].* is at version 1; expected vers"
    )


# ---- The package -----------------------------------------------------------------------------------------------------


def test_modules_that_are_imported_later():
    script = "import weft; print(weft.distributed.slice_sizes(3, 2))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[2, 1]"
    assert weft.info.collect() and {"distributed", "info"} <= {*dir(weft)}
    script = (
        "import torch, weft; torch.distributed.is_available = lambda: False\n"
        "print('distributed' in dir(weft), 'info' in dir(weft))\n"
        "try: weft.distributed\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    there, error = done.stdout.splitlines()
    assert there == "False True" and error.endswith("'distributed': this torch is built without torch.distributed")
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'GRU'"):
        weft.GRU  # noqa: B018


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda wd: wd.shard_time(3), "^shard_time: module must be a torch.nn.Module, got int"),
        (lambda wd: wd.slice_sizes(3.5, 2), "^slice_sizes: steps must be an int, got float"),
        (lambda wd: wd.slice_sizes(3, 0), "^slice_sizes: ranks must be at least 1, got 0"),
        (lambda wd: wd.exchange(2, 8, link=3), "^exchange: link must be a Link, got int"),
        (lambda wd: wd.Link(latency=-1), "^Link: latency must be finite and at least 0 seconds, got -1"),
    ],
)
def test_distributed(call, message):
    refused(lambda: call(weft.distributed), message)


@every
def test_what_is_right_stays_right(name):
    """Layouts that are no mistakes: contiguous or not, one step, pickled, in its own dtype."""
    layer = BOTH[name](4, 8)
    a = torch.randn(2, 4) if name in CELLS else torch.randn(2, 5, 4).transpose(0, 1)
    first = layer(a)
    again = pickle.loads(pickle.dumps(layer))(a.contiguous())
    while not isinstance(first, torch.Tensor):
        first, again = first[0], again[0]
    torch.testing.assert_close(first, again)
    if name in LAYERS and not name.startswith("Para"):
        layer(pack_sequence([a[:, 0], a[:3, 1]]))
    double = layer.double()(a.double())
    assert (double if isinstance(double, torch.Tensor) else double[0]).dtype == torch.float64
