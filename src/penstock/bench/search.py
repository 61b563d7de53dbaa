"""The search for two loads: the highest that keeps the SLO, and the highest that the server keeps up with. Pure.

Loads are doubled until both are lost, then each edge is halved in until it is known well enough, and the answer is
confirmed by a second try. One failed try counts against a load, however many others it passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

MAX_TRIES = 24
MAX_HALVINGS = 6  # below the start; a server that cannot keep the SLO then cannot keep it at all


class Try(NamedTuple):
    load: float
    keeps_slo: bool
    keeps_up: bool


class Edge(NamedTuple):
    """The highest load that passed below all that failed, and the lowest that failed."""

    passed: float | None
    failed: float | None


@dataclass(frozen=True)
class Search:
    start: float
    precision: float = 0.1  # how far apart the two loads of an edge may be, as a share
    is_whole: bool = False  # loads are whole numbers

    def next_load(self, tries: Sequence[Try]) -> float | None:
        """None: it is known."""
        if not tries:
            return self._round(self.start)
        if len(tries) >= MAX_TRIES:
            return None
        slo, up = slo_edge(tries), up_edge(tries)
        if slo.passed is None:
            return self._lower(slo.failed or self.start)
        if slo.failed is None or up.failed is None:
            return self._round(2 * max(one.load for one in tries))
        for edge in (slo, up):
            if (between := self._between(edge)) is not None:
                return between
        is_confirmed = sum(one.load == slo.passed for one in tries) > 1
        return None if is_confirmed else slo.passed

    def expected_loads(self, tries: Sequence[Try]) -> list[float]:
        """Loads that are still to be tried, if the edges are where they seem: in the middle of what is known, or before
        any load failed, just above the highest."""
        imagined, limits = list(tries), [self._likely(edge(tries)) for edge in (slo_edge, up_edge)]
        while (load := self.next_load(imagined)) is not None:
            imagined.append(Try(load, *(load <= limit for limit in limits)))
        return [one.load for one in imagined[len(tries) :]]

    def _likely(self, edge: Edge) -> float:
        if edge.failed is None:
            return 1.5 * (edge.passed or self.start)
        return sqrt(edge.passed * edge.failed) if edge.passed else 0.7 * edge.failed

    def _between(self, edge: Edge) -> float | None:
        if edge.passed is None or edge.failed is None or edge.failed <= edge.passed * (1 + self.precision):
            return None
        middle = self._round(sqrt(edge.passed * edge.failed))
        return middle if edge.passed < middle < edge.failed else None

    def _lower(self, failed: float) -> float | None:
        lower = self._round(failed / 2)
        return None if lower < 0.99 * self.start / 2**MAX_HALVINGS or lower == failed else lower

    def _round(self, load: float) -> float:
        return max(1, round(load)) if self.is_whole else float(f"{load:.3g}")


def slo_edge(tries: Sequence[Try]) -> Edge:
    return _edge(tries, lambda one: one.keeps_slo)


def up_edge(tries: Sequence[Try]) -> Edge:
    return _edge(tries, lambda one: one.keeps_up)


def _edge(tries: Sequence[Try], has_passed: Callable[[Try], bool]) -> Edge:
    failed = min((one.load for one in tries if not has_passed(one)), default=None)
    passed = (one.load for one in tries if has_passed(one) and (failed is None or one.load < failed))
    return Edge(max(passed, default=None), failed)
