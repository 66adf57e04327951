"""Rows of results, as the benchmarks' tests make them up."""

from __future__ import annotations

from benchmarks import rnn, rnn_targets


def row(case: str, metric: str = "forward_backward", mine: float = 1.0, peers: float = 2.0, **other: str) -> dict:
    values = dict(date="2026-01-01", commit="abc", gpu="GPU", torch="2.11.0", cuda="13.0", unit="ms", peer="torch.nn")
    ratio = str(peers / mine) if mine > 0 else ""
    return {
        **values,
        "case": case,
        "metric": metric,
        "weft": str(mine),
        "peer_value": str(peers),
        "ratio": ratio,
        **other,
    }


def rnn_rows(ratio: float = 8.0) -> list[dict]:
    """Invented rows for every case of the table."""
    rows = []
    for device in ("cuda", "cpu"):
        for _, entry in rnn.table(device):
            for metric in entry.metrics:
                floor = metric == "step_forward"
                peer = {"peer": "exchange_floor", "unit": "us"} if floor else {}
                rows.append(row(entry.name, metric, 1.0, 0.5 if floor else ratio, **peer))
    for target in rnn_targets.TARGETS:
        if target.peer != "torch.nn":
            rows.append(row(target.case.name, target.metric, 1.0, ratio, peer=target.peer))
    rows += [row(case.name, "forward", 1.0, ratio, peer="scan") for case in rnn.AUTO_NEWTON]
    return rows
