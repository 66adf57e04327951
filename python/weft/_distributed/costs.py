"""What slices of time are and what an exchange between their ranks costs: arithmetic, free of torch."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

__all__ = ["Exchange", "Link", "Prediction", "exchange", "predict", "slice_sizes"]


@dataclass(frozen=True)
class Link:
    """What connects two ranks.

    Args:
        latency: seconds until a message of no bytes is there. Default: 15e-6.
        bandwidth: bytes per second. Default: 360e9.

    Raises:
        ValueError: latency < 0, bandwidth <= 0, or one is not finite.
    """

    latency: float = 15e-6
    bandwidth: float = 360e9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"Link: latency must be finite and at least 0 seconds, got {self.latency}")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"Link: bandwidth must be finite and above 0 bytes per second, got {self.bandwidth}")


@dataclass(frozen=True)
class Exchange:
    """How ranks bring each other what each of them has."""

    method: str
    """"none" for one rank; "gather", every rank sends to all; "doubling", rounds in which the distance doubles."""
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of a scan over ranks, by its parts."""

    local: float
    """A rank's share of the work."""
    exchange: float
    fixup: float
    """What a rank does once it knows the state that comes in."""
    seconds: float
    """The sum of these, or what the host takes where that is more."""
    efficiency: float
    """The seconds of one rank over those of all ranks together."""


def whole(name: str, argument: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {argument} must be an int, got {type(value).__name__}") from None


def _check_ranks(name: str, ranks: int) -> int:
    ranks = whole(name, "ranks", ranks)
    if ranks < 1:
        raise ValueError(f"{name}: ranks must be at least 1, got {ranks}")
    return ranks


def slice_sizes(steps: int, ranks: int) -> list[int]:
    """The lengths of `ranks` slices of `steps` steps of time: as even as can be, longer ones first.

    Raises:
        TypeError: one is no integer.
        ValueError: steps < 0 or ranks < 1.

    Example:
        >>> weft.distributed.slice_sizes(10, 4)
        [3, 3, 2, 2]
    """
    steps, ranks = whole("slice_sizes", "steps", steps), _check_ranks("slice_sizes", ranks)
    if steps < 0:
        raise ValueError(f"slice_sizes: steps must be at least 0, got {steps}")
    size, longer = divmod(steps, ranks)
    return [size + 1] * longer + [size] * (ranks - longer)


def exchange(ranks: int, bytes: float, link: Link = Link()) -> Exchange:
    """What it costs that every rank learns `bytes` of every rank before it: the cheaper of two ways.

    "gather" takes one round, latency + (ranks - 1) bytes / bandwidth; "doubling" ceil(log2 ranks) rounds of latency +
    bytes / bandwidth each. One rank has nothing to exchange: "none".

    Args:
        ranks: of the group.
        bytes: that each rank sends: of a diagonal scan in float32 8 B H, of a dense one 4 B H (H + 1).
        link: between ranks.

    Raises:
        ValueError: ranks < 1 or bytes < 0.

    Example:
        >>> weft.distributed.exchange(8, 98304).method
        'gather'
    """
    ranks = _check_ranks("exchange", ranks)
    if not isinstance(link, Link):
        raise TypeError(f"exchange: link must be a Link, got {type(link).__name__}")
    if not bytes >= 0:
        raise ValueError(f"exchange: bytes must be at least 0, got {bytes}")
    if ranks == 1:
        return Exchange("none", 0, 0.0)
    gather = link.latency + (ranks - 1) * bytes / link.bandwidth
    rounds = (ranks - 1).bit_length()
    doubling = rounds * (link.latency + bytes / link.bandwidth)
    return Exchange("gather", 1, gather) if gather <= doubling else Exchange("doubling", rounds, doubling)


def predict(
    seconds: float,
    ranks: int,
    bytes: float,
    *,
    fixup: float = 0.0,
    link: Link = Link(),
    host: float = 0.0,
) -> Prediction:
    """What a scan takes that is cut into equal slices for `ranks` ranks.

    Args:
        seconds: of the whole on one rank; for short slices, which have costs that do not shrink, better `ranks` times
            those of a slice alone.
        ranks: of the group.
        bytes: that each rank sends, as of :func:`exchange`.
        fixup: seconds that a rank needs once it knows the state that comes in; one rank needs none. Default: 0.
        link: between ranks.
        host: seconds of the same on one of several ranks whose device only waits for its host, until that has given it
            all of the work, the exchange with it: short slices do. Default: 0.

    Raises:
        ValueError: ranks < 1, bytes < 0, seconds <= 0, fixup < 0 or host < 0.

    Example:
        >>> weft.distributed.predict(41e-3, 8, 98304, fixup=5e-5).efficiency > 0.95
        True
    """
    ranks = _check_ranks("predict", ranks)
    if not seconds > 0:
        raise ValueError(f"predict: seconds must be above 0, got {seconds}")
    if not bytes >= 0:
        raise ValueError(f"predict: bytes must be at least 0, got {bytes}")
    if not fixup >= 0:
        raise ValueError(f"predict: fixup must be at least 0 seconds, got {fixup}")
    if not host >= 0:
        raise ValueError(f"predict: host must be at least 0 seconds, got {host}")
    local, between = seconds / ranks, exchange(ranks, bytes, link).seconds
    after = fixup if ranks > 1 else 0.0
    total = max(local + between + after, host if ranks > 1 else 0.0)
    return Prediction(local, between, after, total, seconds / (ranks * total))
