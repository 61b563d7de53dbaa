"""The version that answered a request, so that a user's word on an answer finds it. The oldest are forgotten."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.rollout import Arm

MAX_REMEMBERED = 100_000


class _Remembered:
    __slots__ = ("arm", "counted_in", "rollout", "tenant", "value")

    def __init__(self, rollout: str, arm: Arm, tenant: str) -> None:
        self.rollout = rollout
        self.arm = arm
        self.tenant = tenant
        self.value: float | None = None  # of the last word on it; None: nobody said anything
        self.counted_in: int | None = None  # step of the rollout


class Complaint(NamedTuple):
    rollout: str
    arm: Arm
    tenant: str
    value: float  # 0 good, up to 1 bad
    before: float | None  # what it was taken for until now; None: this is the first word
    counted_in: int | None = None  # the step whose blocks have that; None: none


class AnswerMemory:
    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._answers: dict[str, _Remembered] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, request_id: str, rollout: str, arm: Arm, tenant: str) -> None:
        if len(self._answers) >= self._most:
            del self._answers[next(iter(self._answers))]
        self._answers[request_id] = _Remembered(rollout, arm, tenant)

    def rollout_of(self, request_id: str) -> str | None:
        found = self._answers.get(request_id)
        return None if found is None else found.rollout

    def complain(self, request_id: str, tenant: str, score: float) -> Complaint | None:
        """`score`: 0 bad, 1 good. None: another gateway's request, another tenant's, or the same was said before."""
        found = self._answers.get(request_id)
        if found is None or found.tenant != tenant:
            return None
        value, before = 1.0 - score, found.value
        if value == before:
            return None
        found.value = value
        return Complaint(found.rollout, found.arm, tenant, value, before, found.counted_in)

    def count(self, request_id: str, step: int) -> None:
        """Remembers the step in which the first word on an answer was counted."""
        if (found := self._answers.get(request_id)) is not None:
            found.counted_in = step
