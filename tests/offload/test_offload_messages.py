"""Mistakes with offload, by the message: it names what was called, the argument, and what to do."""

from __future__ import annotations

import pytest
import torch
import weft
from torch import nn

from tests.messages import refused, step


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
