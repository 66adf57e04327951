"""What linear_scan refuses, and how it says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.scan import linear_scan, linear_scan_reference

from tests.common import DEVICES, assert_close
from tests.scan.linear_scans import device, wide
from tests.scan.samples import LinearScan as Sample


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD = {
    "b is no tensor": ((f32(4, 2, 3), [1.0]), TypeError, "b must be a Tensor, got list"),
    "A is integer": ((f32(4, 2, 3).int(), f32(4, 2, 3)), TypeError, "A must be float16.*got Int"),
    "A alone is complex": ((f32(4, 2, 3).cfloat(), f32(4, 2, 3)), TypeError, "b must have the dtype of A.*got Float"),
    "b is integer": ((f32(4, 2, 3), f32(4, 2, 3).long()), TypeError, "b must have the dtype of A.*got Long"),
    "mixed dtypes": ((f32(4, 2, 3), f32(4, 2, 3).double()), TypeError, "b must have the dtype of A.*got Double"),
    "mixed x0": ((f32(4, 2, 3), f32(4, 2, 3), f32(2, 3).half()), TypeError, "x0 must have the dtype of A.*got Half"),
    "b has rank 2": ((f32(4, 2, 3), f32(4, 6)), ValueError, r"b must be \(T, B, H\), got \[4, 6\]"),
    "A has rank 2": ((f32(4, 3), f32(4, 2, 3)), ValueError, r"A must be \(T, B, H, H\).*got \[4, 3\]"),
    "A has rank 5": ((f32(4, 2, 3, 3, 1), f32(4, 2, 3)), ValueError, r"got \[4, 2, 3, 3, 1\]"),
    "wrong T": ((f32(5, 2, 3, 3), f32(4, 2, 3)), ValueError, r"got \[5, 2, 3, 3\]"),
    "wrong T, diagonal": ((f32(5, 2, 3), f32(4, 2, 3)), ValueError, r"got \[5, 2, 3\]"),
    "wrong B": ((f32(4, 7, 3, 3), f32(4, 2, 3)), ValueError, r"got \[4, 7, 3, 3\]"),
    "wrong H": ((f32(4, 2, 5, 5), f32(4, 2, 3)), ValueError, r"got \[4, 2, 5, 5\]"),
    "A is not square": ((f32(4, 2, 3, 4), f32(4, 2, 3)), ValueError, r"got \[4, 2, 3, 4\]"),
    "x0 has rank 3": ((f32(4, 2, 3), f32(4, 2, 3), f32(1, 2, 3)), ValueError, r"x0 must be \(B, H\).*got \[1, 2, 3\]"),
    "x0 has the wrong B": ((f32(4, 2, 3), f32(4, 2, 3), f32(1, 3)), ValueError, r"x0 must be \(B, H\).*got \[1, 3\]"),
}


@device
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, device: str) -> None:
    arguments, error, message = BAD[case]
    arguments = [t.to(device) if isinstance(t, Tensor) else t for t in arguments]
    with pytest.raises(error, match=f"linear_scan: .*{message}"):
        linear_scan(*arguments)
    sample = Sample(5, 2, 3)
    inputs = sample.inputs(torch.float32, device)
    assert_close(linear_scan(*inputs), linear_scan_reference(*wide(*inputs)))


@pytest.mark.parametrize("case", [case for case in BAD if "no tensor" not in case])
def test_bad_fake_input(case: str) -> None:
    arguments, error, message = BAD[case]
    with FakeTensorMode() as mode, pytest.raises(error, match="linear_scan: .*" + message.split(" ")[0]):
        linear_scan(*(mode.from_tensor(t) for t in arguments))


@pytest.mark.parametrize("device", DEVICES)
def test_meta_tensors_beside_others(device: str):
    A, b, x0 = (torch.zeros(shape, device=device) for shape in ((4, 2, 3, 3), (4, 2, 3), (2, 3)))
    where = rf"must be on the device of A, {device}(:0)?, got meta"
    with pytest.raises(RuntimeError, match=f"linear_scan: b {where}"):
        torch.ops.weft.linear_scan(A, b.to("meta"), x0)
    with pytest.raises(RuntimeError, match=f"linear_scan: x0 {where}"):
        torch.ops.weft.linear_scan(A, b, x0.to("meta"))
    with pytest.raises(RuntimeError, match=rf"linear_scan: b must be on the device of A, meta, got {device}"):
        torch.ops.weft.linear_scan(A.to("meta"), b)
    with pytest.raises(RuntimeError, match=f"linear_scan_backward: x {where}"):
        torch.ops.weft.linear_scan_backward(b, A, b.to("meta"), x0, False, False, [True] * 3)


@pytest.mark.cuda
def test_mixed_devices() -> None:
    with pytest.raises(RuntimeError, match="linear_scan: b must be on the device of A, cpu, got cuda"):
        linear_scan(f32(4, 2, 3), f32(4, 2, 3).cuda())
    with pytest.raises(RuntimeError, match="linear_scan: x0 must be on the device of A, cuda"):
        linear_scan(f32(4, 2, 3).cuda(), f32(4, 2, 3).cuda(), f32(2, 3))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_shape_error_names_the_layout(device):
    b = torch.ones(5, 4, 3, device=device)
    for wrong, message in (
        ((b[0], b[0], None), r"b must be \(T, B, H\), got .4, 3.; time is first$"),
        ((b.transpose(0, 1), b, None), r"A must be .* got .4, 5, 3.; b is \(T, B, H\), time first$"),
        ((b, b, b[:, 0]), r"x0 must be \(B, H\).* got .5, 3.; b is \(T, B, H\), time first$"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_scan(*wrong)
