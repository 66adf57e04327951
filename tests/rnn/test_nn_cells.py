"""weft.nn.LSTM with return_cells."""

from __future__ import annotations

import copy

import pytest
import torch
import weft
from torch.autograd import gradgradcheck
from torch.nn.utils import rnn
from weft._rnn.dropin.torch_limits import why_not_onednn

from tests.common import pairs, relative_error
from tests.rnn.layers import ALGORITHMS, BOUNDS, H, I, _pickled, algorithms, assert_same, devices, layers, states

pytestmark = pytest.mark.usefixtures("exact_fp32", "one_thread")


def cells_of(theirs, x, state=None):
    """c at every step from torch's layer: the last of every beginning, in the other direction of every end."""
    steps = range(1, len(x) + 1)
    found = [torch.stack([theirs(x[:t], state)[1][1][-theirs.bidirectional - 1] for t in steps])]
    if theirs.bidirectional:
        found.append(torch.stack([theirs(x[t - 1 :], state)[1][1][-1] for t in steps]))
    return torch.cat(found, -1)


CELL_OPTIONS = {
    "plain": {},
    "two directions": {"bidirectional": True},
    "two layers": {"num_layers": 2, "bias": False},
    "projected": {"proj_size": 2, "bidirectional": True},
}


@devices
@pairs(algorithm=ALGORITHMS, options=CELL_OPTIONS, given_state=[False, True])
def test_cells(device, algorithm, options, given_state):
    ours, theirs = layers("lstm", device, algorithm=algorithm, return_cells=True, **CELL_OPTIONS[options])
    x = torch.randn(6, 5, I, dtype=torch.float64, device=device, requires_grad=True)
    state = states(ours, 5) if given_state else None
    output, final, cells = ours(x, state)
    expected_output, expected_final = theirs(x, state)
    expected = cells_of(theirs, x, state)
    assert_same([output, *final, cells], [expected_output, *expected_final, expected])
    width = ours.hidden_size
    assert torch.equal(cells[-1, :, :width], final[1][-ours.bidirectional - 1])
    arriving = torch.randn_like(cells)
    grads = [
        torch.autograd.grad(c, [x, *layer.parameters()], arriving, allow_unused=True, materialize_grads=True)
        for layer, c in ((ours, cells), (theirs, expected))
    ]
    assert_same(*grads)


@devices
@algorithms
@pytest.mark.parametrize("cell", ["lstm", "projected"])
def test_cells_are_laid_out_like_the_output(device, cell, algorithm):
    plain, _ = layers(cell, device, algorithm=algorithm, return_cells=True, bidirectional=True)
    first, _ = layers(
        cell, device, algorithm=algorithm, return_cells=True, bidirectional=True, batch_first=True, dropout=0.0
    )
    first.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4, I, dtype=torch.float64, device=device)
    cells = plain(x)[2]
    assert_same([first(x.transpose(0, 1))[2].transpose(0, 1)], [cells])
    for layer in (plain, first):
        assert_same([layer(x[:, 1])[2]], [cells[:, 1]])  # unbatched
    lengths = [4, 1, 6, 4]
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    output, _, packed_cells = plain(packed)
    assert isinstance(packed_cells, rnn.PackedSequence)
    for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(packed_cells, field), getattr(output, field))
    padded, _ = rnn.pad_packed_sequence(packed_cells)
    for row, length in enumerate(lengths):
        assert_same([padded[:length, row]], [plain(x[:length, row])[2]])


@devices
@pytest.mark.parametrize("cell", ["lstm", "projected"])
def test_cells_everywhere(fresh_dynamo, device, cell):
    """Compiled, under autocast, mapped, differentiated by torch.func, twice differentiated, copied."""
    ours, theirs = layers(cell, device, return_cells=True, num_layers=2)
    x = torch.randn(5, 2, I, dtype=torch.float64, device=device)
    cells = ours(x)[2]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x)[2]], [cells])
    assert_same([torch.func.vmap(lambda x: ours(x)[2])(x[None])[0]], [cells])
    tangent = torch.func.jvp(lambda x: ours(x)[2], (x,), (torch.zeros_like(x),))[0]
    assert_same([tangent], [cells])
    assert gradgradcheck(lambda x: ours(x)[2], (x[:3].clone().requires_grad_(),), fast_mode=True)
    twin = _pickled(ours)
    assert twin.return_cells and torch.equal(twin(x)[2], cells)
    single = copy.deepcopy(ours).float()
    with torch.autocast(device, torch.bfloat16):
        output, (_, c_n), narrow = single(x.float())
        expected = (torch.bfloat16, torch.bfloat16)  # where torch's own LSTM cannot run
        if cell != "lstm" or device != "cpu" or why_not_onednn(torch.bfloat16) is None:
            like, (_, like_c_n) = theirs.float()(x.float())
            expected = (like.dtype, like_c_n.dtype)
    assert (output.dtype, c_n.dtype) == expected and narrow.dtype == c_n.dtype
    assert relative_error(narrow, cells) <= BOUNDS[torch.bfloat16]


def test_return_cells_is_a_keyword_of_lstm():
    layer = weft.nn.LSTM(I, H, return_cells=True)
    assert repr(layer) == "LSTM(3, 4, return_cells=True)"
    layer.return_cells = False
    assert len(layer(torch.randn(5, 2, I))) == 2
    for kind in (weft.nn.RNN, weft.nn.GRU):
        with pytest.raises(TypeError):
            kind(I, H, return_cells=True)
    with pytest.raises(TypeError, match="return_cells must be a bool, got str"):
        weft.nn.LSTM(I, H, return_cells="yes")
    swapped = weft.accelerate(torch.nn.LSTM(I, H))
    assert len(swapped(torch.randn(5, 2, I))) == 2
    swapped.return_cells = True
    assert swapped(torch.randn(5, 2, I))[2].shape == (5, 2, H)
