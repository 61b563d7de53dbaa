"""Sticky choices by lot: a number in [0, 1) that is drawn for a request, or is a session's own.

Each pool runs a race of its own length, which the lot decides, at the speed of its weight, and the first one home has
the request. So the same lot falls to the same pool while weights stand, pools get what their weights say, and one whose
weight is raised takes from others without anybody changing places among them: nobody moves who need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf, log
from zlib import crc32

_BITS = 53  # of a float
_MASK = (1 << 64) - 1
_SHADOW = 0x5AD0
_SECOND = 0x2D1CE
_UNIT = 2.0**-64  # of length: over the least of weights it is still a number


def session_bucket(session: str) -> float:
    """The same for the same session, everywhere."""
    digest = blake2b(session.encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)


def race(bucket: float, runners: Sequence[tuple[str, float]]) -> str:
    """The winner of runners by name and weight, the same whatever becomes of the weights of the rest.

    The lengths are exponentially distributed and independent. Of the first two the lot is the ratio, which makes the
    shares of two pools exact, and not only on average.
    """
    lengths = [bucket, 1.0 - bucket]
    if len(runners) > 2:
        both = -log(_luck(bucket, 1)) - log(_luck(bucket, 2))
        lengths = [
            both * bucket,
            both * (1.0 - bucket),
            *(-log(_luck(bucket, crc32(name.encode()))) for name, _ in runners[2:]),
        ]
    winner, best = runners[0][0], inf
    for length, (name, weight) in zip(lengths, runners, strict=False):
        if weight and (took := length * _UNIT / weight) < best:
            winner, best = name, took
    return winner


def is_among(bucket: float, name: str, share: float) -> bool:
    """Whether a lot is among the share of all that has something else done with it, apart from who wins its race."""
    return _luck(bucket, crc32(name.encode()) ^ _SHADOW) < share


def rehashed(bucket: float) -> float:
    """A lot for a second race, which says nothing of the first one's."""
    return _luck(bucket, _SECOND)


def _luck(bucket: float, salt: int) -> float:
    """Returns a number in (0, 1) that is independent for another salt: the finalizer of splitmix64."""
    mixed = (int(bucket * (1 << _BITS)) + salt * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((mixed ^ (mixed >> 31)) >> (64 - _BITS)) + 0.5) / (1 << _BITS)
