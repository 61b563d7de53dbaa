"""Pipelines as the page shows them: the steps of one request, and what was counted of each step since this process
began. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from penstock.gateway.records.trace import StepVisit

MAX_STEPS = 200  # of one request that are kept to be shown
_MAX_COUNTED = 1000  # steps of all pipelines; names are the operator's


class StepRow(Struct, frozen=True):
    """An attempt at a step, with seconds since the first began."""

    name: str
    kind: str
    outcome: str
    reason: str
    model: str
    request: str  # id of the request that a model step made
    from_s: float
    to_s: float
    number: int
    input_tokens: int
    output_tokens: int
    cost: float


class StepCountRow(Struct, frozen=True):
    pipeline: str
    step: str
    kind: str
    model: str
    ok: int
    others: dict[str, int]  # attempts that ended in another way: failed, timeout, cancelled
    mean_s: float | None  # mean of the attempts that were ok
    tokens: int
    cost: float


def step_rows(steps: Iterable[StepVisit]) -> list[StepRow]:
    """Rows of the steps, in the order in which they began."""
    ordered = sorted(steps, key=lambda one: one.began)
    return [
        StepRow(
            one.name,
            one.kind,
            one.outcome,
            one.reason,
            one.model,
            one.request_id,
            round(one.began - ordered[0].began, 6),
            round(one.ended - ordered[0].began, 6),
            one.number,
            one.input_tokens,
            one.output_tokens,
            one.cost,
        )
        for one in ordered
    ]


class _Count:
    __slots__ = ("cost", "kind", "model", "ok", "ok_s", "others", "tokens")

    def __init__(self, kind: str, model: str) -> None:
        self.kind = kind
        self.model = model
        self.ok = self.tokens = 0
        self.ok_s = self.cost = 0.0
        self.others: dict[str, int] = {}


class StepCounts:
    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def add(self, pipeline: str, steps: Iterable[StepVisit]) -> None:
        for step in steps:
            count = self._counts.get((pipeline, step.name))
            if count is None:
                if len(self._counts) >= _MAX_COUNTED:
                    continue
                count = self._counts[pipeline, step.name] = _Count(step.kind, step.model)
            if step.outcome == "ok":
                count.ok += 1
                count.ok_s += step.ended - step.began
            else:
                count.others[step.outcome] = count.others.get(step.outcome, 0) + 1
            count.tokens += step.input_tokens + step.output_tokens
            count.cost += step.cost

    def rows(self) -> list[StepCountRow]:
        return list(self._rows())

    def _rows(self) -> Iterator[StepCountRow]:
        for (pipeline, step), one in sorted(self._counts.items(), key=lambda item: item[0][0]):
            mean_s = round(one.ok_s / one.ok, 6) if one.ok else None
            yield StepCountRow(
                pipeline, step, one.kind, one.model, one.ok, dict(one.others), mean_s, one.tokens, one.cost
            )
