"""zeros_changed: whether weights have other zeros than they had."""

from __future__ import annotations

import pytest
import torch

from tests.common import DEVICES, DTYPES

device = pytest.mark.parametrize("device", DEVICES)


@device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_in_both_directions(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    sizes = [(3, 5), (0,), (2049,), (7, 3, 3, 3), *[(2, 2)] * 70]
    weights = [(torch.randn(s, device=device) * (torch.rand(s, device=device) < 0.5)).to(dtype) for s in sizes]
    weights[2][5] = -0.0
    stored = [w != 0 for w in weights]
    assert torch.ops.weft.zeros_changed(weights, stored).tolist() == [0]
    for which, place in ((0, 3), (2, 2048), (3, 100), (73, 3)):
        flat = weights[which].view(-1)
        before = flat[place].clone()
        flat[place] = 0 if before != 0 else float("nan")
        assert torch.ops.weft.zeros_changed(weights, stored).tolist() == [1]
        flat[place] = before
    assert torch.ops.weft.zeros_changed(weights, stored).tolist() == [0]
    assert torch.ops.weft.zeros_changed(weights[1:2], stored[1:2]).tolist() == [0]


def test_bad_input() -> None:
    weight = torch.ones(2, 3)
    for weights, stored, error, message in (
        ([weight], [], ValueError, "as many"),
        ([weight], [weight], TypeError, "must be bool"),
        ([weight.int()], [weight != 0], TypeError, "must be float16"),
        ([weight, weight.double()], [weight != 0] * 2, TypeError, "dtype of weights"),
        ([weight], [torch.ones(5, dtype=torch.bool)], ValueError, "size of its weight"),
        ([weight.t()], [weight.t() != 0], ValueError, "contiguous"),
    ):
        with pytest.raises(error, match=f"zeros_changed: .*{message}"):
            torch.ops.weft.zeros_changed(weights, stored)
