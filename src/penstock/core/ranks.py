"""Ranks of a model that is spread over several processes: how one stands, and its loss, which ends the engine."""

from __future__ import annotations

from msgspec import Struct


class RankReading(Struct, frozen=True):
    """How one rank of a model stands: one of several processes, on this machine or another."""

    rank: int
    node: str = ""  # where it is, if there are several machines
    memory_bytes: int = 0  # of its process, or of its GPU, that it has taken
    communication_s: float | None = None  # in sums and gathers with others, since its start; None: nobody measures it


class RankLost(BaseException):
    """A rank died, hung or fell behind. No step can run without it, so its engine ends, and all ranks start anew: it is
    not for those who go on after a step that failed, and catch `Exception`."""

    def __init__(self, rank: int, why: str, where: str = "") -> None:
        """`where`: the rank's node, if there are several."""
        super().__init__(f"rank {rank} of the model{f' ({where})' if where else ''} is lost: {why}")
        self.rank = rank
        self.why = why
        self.where = where
