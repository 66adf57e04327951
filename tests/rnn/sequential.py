"""The backward chain of a recurrent layer as a loop, and what a comparison with it means where weights are chaotic."""

from __future__ import annotations

import numpy
import torch


def doubles(tensors):
    return [None if t is None else t.detach().double().cpu() for t in tensors]


def cell_step(cell, a, b, h, c):
    """One step in plain torch from a = W_ih x + b_ih and b = W_hh h + b_hh: h, c (None except for an lstm) and the
    gates after their nonlinearity, (B, 4H), as Weft's operators save them (None for the rnns)."""
    if cell == "gru":
        (ar, az, an), (br, bz, m) = a.chunk(3, 1), b.chunk(3, 1)
        r, z = torch.sigmoid(ar + br), torch.sigmoid(az + bz)
        n = torch.tanh(an + r * m)
        return (1 - z) * n + z * h, None, torch.cat([r, z, n, m], 1)
    if cell == "lstm":
        i, f, g, o = (a + b).chunk(4, 1)
        i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
        c = f * c + i * g
        return o * torch.tanh(c), c, torch.cat([i, f, g, o], 1)
    return (torch.tanh if cell == "rnn_tanh" else torch.relu)(a + b), None, None


def reference_chain(grad_output, grad_h_n, grad_c_n, args, output, gates, cells, *, cell, reverse=False):
    """The backward chain, one step after another, from the saved activations of weft::rnn: grad_input, grad_h0,
    grad_c0, and the gradients (T, B, G*H) of W_ih x + b_ih and of W_hh h + b_hh.

    In numpy, whose small products cost a tenth of torch's, in the dtype of its arguments.
    """
    input, h0, c0, w_ih, w_hh = (None if t is None else t.numpy() for t in args[:5])
    output, gates, cells = output.numpy(), gates.numpy(), cells.numpy()
    h0, c0 = h0[0], None if c0 is None else c0[0]
    dh = numpy.zeros_like(h0) if grad_h_n is None else grad_h_n[0].numpy()
    dc = numpy.zeros_like(h0) if grad_c_n is None else grad_c_n[0].numpy()
    order = range(len(input))[::-1] if reverse else range(len(input))
    entering, recurrent = (numpy.zeros((*input.shape[:2], len(w_hh)), input.dtype) for _ in range(2))
    with numpy.errstate(all="ignore"):
        for index in reversed(range(len(order))):
            t, before = order[index], order[index - 1]
            if grad_output is not None:
                dh = dh + grad_output[t].numpy()
            h = output[t]
            if cell == "gru":
                r, z, n, m = numpy.split(gates[t], 4, 1)
                previous = output[before] if index else h0
                dn = dh * (1 - z) * (1 - n * n)
                dz = dh * (previous - n) * z * (1 - z)
                dr = dn * m * r * (1 - r)
                entering[t] = numpy.concatenate([dr, dz, dn], 1)
                recurrent[t] = numpy.concatenate([dr, dz, dn * r], 1)
                dh = recurrent[t] @ w_hh + dh * z
                continue
            if cell == "lstm":
                i, f, g, o = numpy.split(gates[t], 4, 1)
                previous = cells[before] if index else c0
                squashed = numpy.tanh(cells[t])
                d = dc + dh * o * (1 - squashed * squashed)
                di, df, dg = d * g * i * (1 - i), d * previous * f * (1 - f), d * i * (1 - g * g)
                pre = numpy.concatenate([di, df, dg, dh * squashed * o * (1 - o)], 1)
                dc = d * f
            else:
                pre = dh * (1 - h * h) if cell == "rnn_tanh" else numpy.where(h > 0, dh, 0).astype(dh.dtype)
            entering[t] = recurrent[t] = pre
            dh = pre @ w_hh
        found = (entering @ w_ih, dh[None], dc[None] if cell == "lstm" else None, entering, recurrent)
    return tuple(None if f is None else torch.from_numpy(f) for f in found)


def check_chain(found, grads, args, saved, *, cell, reverse=False) -> bool:
    """grad_input, grad_h0 and grad_c0 beside the loop's over the same activations, finite wherever the loop's are.

    Args:
        found: the three gradients that are checked.
        grads: gradients of output, h_n and c_n, each may be None.
        args: input, h0, c0, w_ih, w_hh, b_ih and b_hh of one direction.
        saved: its output, gates (T, B, 4H) and cells that weft::rnn returned with save=True.

    Returns:
        Whether no step was left out. Close to the largest number of fp32 the order of a sum decides whether it
        overflows, and once a state has overflowed, everything earlier in the chain has: such steps are not compared.
    """
    cpu = [None if t is None else t.detach().cpu() for t in (*grads, *args, *saved)]
    loop, exact = (reference_chain(*t[:3], t[3:10], *t[10:], cell=cell, reverse=reverse) for t in (cpu, doubles(cpu)))
    largest = exact[0].abs().amax((-1, -2)).nan_to_num(nan=torch.inf)
    largest = (largest if reverse else largest.flip(0)).cummax(0).values
    usable = largest < 1e34
    usable = usable if reverse else usable.flip(0)
    assert usable.sum() > 5
    ends = usable.all()
    for f, single, double, rows in zip(found, loop, exact, (usable, ends, ends), strict=False):
        if single is None or not rows.any():
            continue
        f, single, double = f.detach().cpu()[rows], single[rows], double[rows]
        assert single.isfinite().all()
        assert f.isfinite().all()
        size = double.norm(dim=-1).clamp_min(1e-30)
        # What fp32 loses by cancellation stays in the vector: the loop in fp32 says how much that is.
        lost = ((single - double).norm(dim=-1) / size).max()
        assert ((f - double).norm(dim=-1) / size).max() <= 1e-4 + 10 * lost
    return bool(ends)
