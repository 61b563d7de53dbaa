"""Ranks of a model that is spread over several processes: how one stands, and its loss, which ends the engine.

a rank's steps ──▶ RankUsage ──▶ leader ──▶ RankReading ──▶ server ──▶ RankFigures ──▶ report, console, traces
                                                              └─ metrics
"""

from __future__ import annotations

from msgspec import Struct


class RankUsage(Struct, frozen=True):
    """Memory that a rank has taken, and time of its steps since its start."""

    memory_bytes: int = 0  # of its process, or of its GPU
    communication_s: float | None = None  # of its steps, with other ranks, waits included; None: nobody knows
    is_estimated: bool = False  # the above: its collectives, by what each took when it was measured, without waits
    busy_s: float = 0.0  # in steps, communication included
    num_steps: int = 0
    device: str = ""  # the UUID of its GPU; "": a CPU


class RankReading(Struct, frozen=True):
    """Reading of one rank of a model: one of several processes, on this machine or another."""

    rank: int
    node: str = ""  # where it is, if there are several machines
    usage: RankUsage = RankUsage()


class RankReads(Struct, frozen=True):
    """Bytes that a rank reads in a step: its part of the weights, and of each token of context in the cache."""

    weight_bytes: int
    kv_token_bytes: int


class RankFigures(Struct, frozen=True):
    """A rank's shares in recent steps, for those who look at a replica."""

    rank: int
    node: str = ""
    device: str = ""
    memory_bytes: int = 0
    mbu: float | None = None  # of the bandwidth of its device; None: nobody has measured such a device
    communication: float | None = None  # of its steps' time; None: nobody knows, or no step has run
    is_estimated: bool = False  # the above: see `RankUsage`


class RankLost(BaseException):
    """A rank died, hung or fell behind. No step can run without it, so its engine ends, and all ranks start anew: it is
    not for those who go on after a step that failed, and catch `Exception`."""

    def __init__(self, rank: int, why: str, where: str = "") -> None:
        """`where`: the rank's node, if there are several."""
        super().__init__(f"rank {rank} of the model{f' ({where})' if where else ''} is lost: {why}")
        self.rank = rank
        self.why = why
        self.where = where
