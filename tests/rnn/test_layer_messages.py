"""Mistakes with layers and cells, by the message: it names what was called, the argument, and what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from weft.nn import GRU, LRU, LSTM, RGLRU, RNN, S5, SLSTM, MinGRU, ParaGRU

from tests.messages import BOTH, CELLS, LAYERS, TORCHS, cells, every, layers, refused, x


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


@cells
@pytest.mark.parametrize("algorithm", ["auto", "torch"])
def test_a_cells_input_or_state_of_a_layout_of_its_own(name, algorithm):
    for input, change, wrong in (
        (x(2, 4).to_mkldnn(), lambda s: s, "input"),
        (x(2, 4), torch.Tensor.to_mkldnn, r"(hx|h|hidden)(\[0\])?"),
    ):
        count = STATES.get(name, 1)
        state = (change(x(2, 8)),) * count
        refused(
            lambda: CELLS[name](4, 8, algorithm=algorithm)(input, state[0] if count == 1 else state),  # noqa: B023
            rf"^{name}: {wrong} has the layout _mkldnn, .*to_dense\(\)",
        )


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
