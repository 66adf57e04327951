"""What a slice of a linear recurrence does to a state, x -> product x + value, and what follows from those of all
ranks. Plain torch.

Products of many steps leave the range of the state where the state itself does not, so a product is m 2^e, and sent as
a number with one bit more of exponent than the state's dtype has, which spans every ratio of two states, and one bit
less of mantissa. What lies beyond saturates: below it is zero to every state, above it only a state of zero stays
finite, and does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["columns_of", "multiplied", "pack", "product_of_steps", "scaled", "unpack"]

_NEVER = -(1 << 40)
"""The exponent of a zero: below every other."""
_UNSCALED = 6
"""Factors of float32, from 2^-149 to 2^128, whose product float64 holds."""
_MANTISSAS = 512
"""Factors in [0.5, 1), likewise."""


def scaled(t: Tensor) -> tuple[Tensor, Tensor]:
    """m and e of t = m 2^e, m 0, in [0.5, 1) or not finite."""
    m, e = torch.frexp(t)
    return m, torch.where(m != 0, e.to(torch.int64), _NEVER)


def _ldexp(t: Tensor, e: Tensor) -> Tensor:
    """t 2^e in float64, for any e."""
    for _ in range(3):
        part = e.clamp(-1022, 1023)
        t = t * ((part + 1023) << 52).view(torch.float64)
        e = e - part
    return t


def product_of_steps(A: Tensor, steps: int, diagonal: bool, transpose: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    """m and e, float64 and int64, of the product m 2^e of all steps.

    Args:
        A: ``(T, B, H)`` or, constant in time, ``(1, ...)`` or ``(H)``, diagonal; else ``(T, B, H, H)`` or
            ``(T, 1, H, H)``.
        steps: T.

    Returns:
        ``(B, H)`` or ``(H)`` and the like of a diagonal A; else ``(B, H, H)``, B or 1.
    """
    if diagonal:
        return _power(A, steps) if A.dim() == 1 or A.size(0) != steps else _diagonal_product(A)
    matrices = A.mT if transpose else A
    return _dense_product(matrices.flip(0) if reverse else matrices)


def _grouped(t: Tensor, count: int, fill: float) -> Tensor:
    """(T, ...) as (groups, count, ...), `fill` beyond the end."""
    short = -t.size(0) % count
    if short:
        t = torch.cat((t, t.new_full((short, *t.shape[1:]), fill)))
    return t.unflatten(0, (-1, count))


def _diagonal_product(A: Tensor) -> tuple[Tensor, Tensor]:
    """A is read once, and what follows is of a few of its bytes."""
    if A.dtype == torch.float64:
        t = A
    else:
        whole = A.size(0) // _UNSCALED * _UNSCALED
        if A.device.type == "cpu":  # whose products over a dimension in the middle are slow
            t = A[:whole:_UNSCALED].double()
            for k in range(1, _UNSCALED):
                t.mul_(A[k:whole:_UNSCALED])
        else:
            t = A[:whole].unflatten(0, (-1, _UNSCALED)).prod(1, dtype=torch.float64)
        t = torch.cat((t, A[whole:].prod(0, keepdim=True, dtype=torch.float64)))
    e = torch.zeros((), dtype=torch.int64, device=A.device)
    while True:
        m, more = torch.frexp(t)
        e = e + more.sum(0, dtype=torch.int64)
        if m.size(0) == 1:
            return m.squeeze(0), e
        # So many numbers of at least a half are far from the end of the range.
        t = _grouped(m, min(_MANTISSAS, m.size(0)), 1.0).prod(1)


def _power(A: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A ** steps by squaring."""
    if A.dim() == 3:
        A = A.squeeze(0)
    base, base_e = torch.frexp(A.double())
    base_e = base_e.to(torch.int64)
    m, e = torch.full_like(base, 0.5), torch.ones_like(base_e)
    while steps > 0:
        if steps % 2:
            m, more = torch.frexp(m * base)
            e = e + base_e + more
        base, more = torch.frexp(base * base)
        base_e, steps = 2 * base_e + more, steps // 2
    return m, e


def columns_of(t: Tensor) -> tuple[Tensor, Tensor]:
    """t (..., H, H) with the largest entry of every column in [0.5, 1), and the columns' exponents (..., 1, H)."""
    e = scaled(t)[1].amax(-2, keepdim=True).clamp_min(-5000)
    return _ldexp(t, -e), e


def _dense_product(A: Tensor) -> tuple[Tensor, Tensor]:
    """Of matrices (T, B, H, H), the last leftmost. Columns carry exponents, as each says what becomes of one component
    of the state."""
    t = A.double()
    if A.dtype != torch.float64:  # products of four are within the range of float64
        for _ in range(2):
            even = t.size(0) // 2 * 2
            t = torch.cat((t[1:even:2] @ t[0:even:2], t[even:]))
    t, e = columns_of(t)
    while t.size(0) > 1:
        even = t.size(0) // 2 * 2
        products, exponents = multiplied(t[1:even:2], e[1:even:2], t[0:even:2], e[0:even:2])
        t, e = torch.cat((products, t[even:])), torch.cat((exponents, e[even:]))
    m, own = scaled(t.squeeze(0))
    return m, own + e.squeeze(0)


def multiplied(later: Tensor, rows: Tensor, earlier: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The product of two matrices of columns_of, and its exponents likewise: row r of the earlier one meets column r of
    the later one and takes its exponent, of `rows`."""
    rows = rows.mT
    largest = (scaled(earlier)[1] + rows).amax(-2, keepdim=True).clamp_min(-(1 << 39))
    product, more = columns_of(later @ _ldexp(earlier, rows - largest))
    return product, e + largest + more


def _layout(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """Of a packed number: its dtype, and the bits of exponent and of mantissa."""
    return (torch.int64, 12, 51) if dtype == torch.float64 else (torch.int32, 9, 22)


def pack(m: Tensor, e: Tensor, dtype: torch.dtype) -> Tensor:
    """m 2^e, where m is 0, in [0.5, 1), or not finite, in the bits of one number of a state's dtype."""
    integer, exponent_bits, mantissa_bits = _layout(dtype)
    bits = m.view(torch.int64)
    magnitude, sign = bits & ((1 << 63) - 1), bits >> 63
    drop, most = 52 - mantissa_bits, (1 << exponent_bits) - 1
    # The bits of m say its exponent as 1022; rounding may carry into it.
    rounded = (magnitude + (1 << (drop - 1))) >> drop
    field = e.clamp(-(1 << 20), 1 << 20) + (most >> 1)
    packed = rounded + ((field - 1022) << mantissa_bits)
    packed = torch.where(field >= most, (most << mantissa_bits) - 1, packed)
    packed = torch.where((field <= 0) | (m == 0), 0, packed)
    special = (most << mantissa_bits) + m.isnan()
    packed = torch.where(m.isfinite(), packed.clamp_max((most << mantissa_bits) - 1), special)
    return (packed | (sign << (exponent_bits + mantissa_bits))).to(integer)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """In float64; what is beyond its range saturates."""
    _, exponent_bits, mantissa_bits = _layout(dtype)
    bits = packed.to(torch.int64)
    magnitude, most = bits & ((1 << (exponent_bits + mantissa_bits)) - 1), (1 << exponent_bits) - 1
    field, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    m = ((mantissa << (52 - mantissa_bits)) | (1022 << 52)).view(torch.float64)
    finite = _ldexp(m, field - (most >> 1)).clamp_max(torch.finfo(torch.float64).max)
    special = torch.where(mantissa == 0, math.inf, math.nan)
    value = torch.where(field == most, special, torch.where(field == 0, 0.0, finite))
    return torch.where(bits < 0, -value, value)
