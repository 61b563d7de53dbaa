"""Time of one rank's steps, and the part of it in communication with other ranks. Read by others while steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from penstock.model.ranks import Ranks
from penstock.model.stages import Stage


class StepMeter:
    def __init__(self, communication: Callable[[], float] | None = None) -> None:
        """`communication`: seconds with other ranks so far, in steps and beside them; None: nobody knows."""
        self.num_steps = 0
        self.busy_s = 0.0
        self.communication_s: float | None = None if communication is None else 0.0
        self._communication = communication or (lambda: 0.0)

    @contextmanager
    def step(self, *, is_waited_for: bool = True) -> Iterator[None]:
        """A step that runs or is launched meanwhile. `is_waited_for`: it is done then; else its time is added later."""
        began_s, before_s = perf_counter(), self._communication()
        yield
        self.num_steps += 1
        if is_waited_for:
            self.busy_s += perf_counter() - began_s
        self.add_communication(self._communication() - before_s)

    def add_communication(self, seconds: float) -> None:
        if self.communication_s is not None:
            self.communication_s += seconds


def communication_of(ranks: Ranks, stage: Stage) -> Callable[[], float] | None:
    """Seconds of a rank in collectives of its stage and in links to others; None: none of them counts."""
    counting: list[Any] = [one for one in (ranks, stage.before, stage.after) if hasattr(one, "communication_s")]
    return (lambda: sum(one.communication_s for one in counting)) if counting else None
