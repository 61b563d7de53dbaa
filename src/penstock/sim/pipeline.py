"""Stages of a simulated pipeline, all as long, with one step in each at a time: when a step leaves the last one."""

from __future__ import annotations


class Pipeline:
    __slots__ = ("_free_s",)

    def __init__(self, stages: int) -> None:
        self._free_s = [0.0] * stages  # when each is done with all that entered so far

    def end_s(self, now: float, seconds: float) -> float:
        """The end of a step that enters now, behind the others; `seconds`: its way through stages that are empty."""
        each_s, at_s = seconds / len(self._free_s), now
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + each_s
        return at_s
