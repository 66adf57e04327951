"""weft.accelerate and the sLSTM cells of the xlstm package."""

from __future__ import annotations

import copy

import pytest
import torch
import weft


def package():
    """Its cells. What it imports takes a second, not for who only collects tests."""
    return pytest.importorskip("xlstm.blocks.slstm.cell", reason="xlstm is for Python 3.11 and later")


def make_cell(**options):
    fields = {"hidden_size": 12, "num_heads": 3, "backend": "vanilla", "dtype": "float32", **options}
    cell = package().sLSTMCell(package().sLSTMCellConfig(enable_automatic_mixed_precision=False, **fields))
    with torch.no_grad():
        for weight in cell.parameters():
            weight.uniform_(-1, 1)
    return cell


def both(cell, x, state=None):
    """Output, state and gradients of the package's cell and of the swapped one."""
    swapped = weft.accelerate(torch.nn.ModuleDict({"cell": copy.deepcopy(cell)}))["cell"]
    found = []
    for each in (cell, swapped):
        inputs = [t.clone().requires_grad_() for t in (x, *([] if state is None else [state]))]
        output, last = each(*inputs)
        grads = torch.autograd.grad([output.sin().sum(), last.sin().sum()], [*inputs, *each.parameters()])
        found.append([output, last, *grads])
    return found


@pytest.mark.parametrize("layout", ["SBGNH", "BSGNH"])
@pytest.mark.parametrize("output", ["BNSH", "SBH", "BSH", "SBNH"])
def test_one_to_one(layout, output):
    cell = make_cell(input_shape=layout, output_shape=output)
    x = torch.randn(*((7, 2) if layout == "SBGNH" else (2, 7)), 48)
    for a, b in zip(*both(cell, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_from_a_state():
    cell = make_cell()
    _, state = cell(torch.randn(2, 5, 48))
    for a, b in zip(*both(cell, torch.randn(2, 7, 48), state.detach()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_in_a_layer_and_back():
    from xlstm.blocks.slstm import layer as layer_module

    config = layer_module.sLSTMLayerConfig(
        embedding_dim=16, num_heads=4, backend="vanilla", dtype="float32", enable_automatic_mixed_precision=False
    )
    layer = layer_module.sLSTMLayer(config)
    layer.reset_parameters()
    x = torch.randn(2, 9, 16)
    expected, keys, cell = layer(x), layer.state_dict().keys(), layer.slstm_cell
    assert weft.accelerate(layer) is layer
    assert layer.slstm_cell is cell and "accelerated=True" in repr(layer) and layer.state_dict().keys() == keys
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(cell, package().sLSTMCellBase)
    other = copy.deepcopy(layer)
    torch.testing.assert_close(other(x), layer(x))
    assert "accelerated=True" in repr(other)
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    gates = torch.randn(2, 5, 64)
    torch.testing.assert_close(compiled(gates)[0], cell(gates)[0])
    weft.restore(layer)
    assert type(cell) is package().sLSTMCell_vanilla and "accelerated" not in repr(layer)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "options", [{"gradient_recurrent_cut": True}, {"gradient_recurrent_clipval": 1.0}, {"forward_clipval": 2.0}]
)
def test_what_is_left_and_why(options):
    model = torch.nn.ModuleDict({"cell": make_cell(**options)})
    with pytest.warns(UserWarning, match=f"cell .*sLSTMCell_vanilla.* has {next(iter(options))}"):
        weft.accelerate(model)
    assert type(model["cell"]) is package().sLSTMCell_vanilla


def test_half_precision_under_autocast():
    cell = make_cell()
    x = torch.randn(2, 7, 48)
    expected = cell(x)[0]
    weft.accelerate(torch.nn.ModuleDict({"cell": cell}))
    with torch.autocast("cpu", torch.bfloat16):
        found = cell(x.bfloat16())[0]
    assert (found.float() - expected).norm() < 5e-2 * expected.norm()
