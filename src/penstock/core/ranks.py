"""The loss of a rank: what ends an engine whose model is spread over several processes."""

from __future__ import annotations


class RankLost(BaseException):
    """A rank died, hung or fell behind. No step can run without it, so its engine ends, and all ranks start anew: it is
    not for those who go on after a step that failed, and catch `Exception`."""

    def __init__(self, rank: int, why: str, where: str = "") -> None:
        """`where`: the rank's node, if there are several."""
        super().__init__(f"rank {rank} of the model{f' ({where})' if where else ''} is lost: {why}")
        self.rank = rank
        self.why = why
        self.where = where
