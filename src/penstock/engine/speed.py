"""Speed of an engine, from what it reports: prompt tokens per second, and the time of a step that only decodes."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.messages import StepFigures

_KEEP = 0.95  # of what was known, at every step


class StepSpeed:
    """Recent steps count most. Prompts are measured as they go, beside the decodes that share their steps, because that
    is how fast a queue gets shorter."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self.decode_step_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._prefill_tokens / self._prefill_s if self._prefill_s else None

    def observe(self, step: StepFigures) -> None:
        if step.cost_s <= 0 or step.num_drafts:  # with drafts a step is longer, and makes more
            return
        prefill_tokens = step.num_tokens - step.num_sequences
        if prefill_tokens > 0:
            self._prefill_tokens = _KEEP * self._prefill_tokens + prefill_tokens
            self._prefill_s = _KEEP * self._prefill_s + step.cost_s
        else:
            self.decoded([step.cost_s])

    def decoded(self, steps_s: Iterable[float]) -> None:
        """Steps that only decoded, by what each took."""
        known_s = self.decode_step_s
        for step_s in steps_s:
            known_s = step_s if known_s is None else _KEEP * known_s + (1 - _KEEP) * step_s
        self.decode_step_s = known_s
