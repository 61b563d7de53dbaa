"""Rebalancing of a mixture's experts while the engine runs: a plan is made from what was counted, and carried out one
layer at a time, between two steps. Requests go on meanwhile.

It knows counts and placements; whose weights are read where is behind `ExpertRanks`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from penstock.core.errors import Conflict, PenstockError, UnsupportedTask
from penstock.core.expert_load import ExpertLoad
from penstock.core.expert_placement import ExpertPlacement, balanced_placement, imbalance_of
from penstock.engine.messages import RebalanceAnswer

WORTHWHILE = 0.02  # less imbalance, as a share of the mean, for which a layer's experts are read anew


class ExpertRanks(Protocol):
    """The experts of all ranks of a model."""

    @property
    def redundant(self) -> int | None:
        """Slots of each rank beyond its share; None: whole experts are not shared out, and none can be moved."""

    def load(self) -> ExpertLoad: ...

    def place(self, layer: int, placement: ExpertPlacement) -> None:
        """Places the layer's experts on all ranks, before the next step."""


class Rebalancing:
    def __init__(self, experts: ExpertRanks | None) -> None:
        self._experts = experts
        self._left: deque[tuple[int, ExpertPlacement]] = deque()
        self._counted = ExpertLoad()  # that the last plan was made from
        self._answer = RebalanceAnswer()

    @property
    def is_busy(self) -> bool:
        return bool(self._left)

    def begin(self, model: str = "") -> RebalanceAnswer | None:
        """Plan for the tokens since the last plan. None: there is something to do, and `step` gives the answer."""
        try:
            return self._begin(model)
        except PenstockError as error:
            return RebalanceAnswer(code=error.code, message=error.message, model=model)

    def _begin(self, model: str) -> RebalanceAnswer | None:
        experts = self._experts
        if experts is None or experts.redundant is None:
            raise UnsupportedTask("this engine has no whole experts that are shared out among ranks: it needs --ep")
        if self.is_busy:
            raise Conflict("experts are being rebalanced already")
        load = experts.load()
        new = load.since(self._counted)
        if not new.num_tokens:
            raise Conflict("no token was routed since the start, or since the last rebalancing")
        self._counted = load
        before, after = list[list[float]](), list[list[float]]()
        for layer, found in new.layers.items():
            now = ExpertPlacement(tuple(map(tuple, found.ranks)))
            wanted = balanced_placement(found.counts, len(found.ranks), experts.redundant)
            is_worthwhile = now.imbalance(found.counts) - wanted.imbalance(found.counts) > WORTHWHILE
            if is_worthwhile:
                self._left.append((layer, wanted))
            before.append(now.rank_loads(found.counts))
            after.append((wanted if is_worthwhile else now).rank_loads(found.counts))
        self._answer = RebalanceAnswer(len(self._left), imbalance_of(before), imbalance_of(after), model=model)
        return None if self._left else self._answer

    def step(self) -> RebalanceAnswer | None:
        """Move the experts of one layer. The answer comes after the last."""
        assert self._experts is not None
        self._experts.place(*self._left.popleft())
        return None if self._left else self._answer
