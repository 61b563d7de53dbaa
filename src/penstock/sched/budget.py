"""How many tokens a step may carry: the chunk size, tightened while steps take longer than the target per token."""

from __future__ import annotations


class StepBudget:
    """Every running stream gets one token per step, so the time of a step is everybody's time per output token.

    A step that carried decodes and took too long shrinks the budget in proportion; one that had time to spare lets it
    grow by a quarter. The budget bounds prefill chunks and how many sequences are let in; running decodes always go.
    """

    def __init__(self, chunk_tokens: int, *, target_s: float | None, floor: int) -> None:
        self._ceiling = chunk_tokens
        self.floor = min(
            floor, chunk_tokens
        )  # what prompts get at least: one that has begun, or that has waited too long
        self._target_s = target_s
        self._tokens = float(chunk_tokens)

    @property
    def tokens(self) -> int:
        """What a step with decodes in it may carry."""
        return int(self._tokens)

    def tokens_beside(self, num_decodes: int) -> int:
        """What a step may carry besides its decodes; with none, nobody waits for it and it may be full."""
        return int(self._tokens) - num_decodes if num_decodes else self._ceiling

    def observe(self, num_tokens: int, num_decodes: int, elapsed_s: float) -> None:
        if self._target_s is None or num_decodes == 0 or elapsed_s <= 0:
            return
        if elapsed_s > self._target_s:
            wanted = min(self._tokens, num_tokens) * max(0.5, self._target_s / elapsed_s)
        elif num_tokens >= 0.5 * self._tokens:  # only a step that used the budget says that it can grow
            wanted = self._tokens * 1.25 + 1
        else:
            return
        self._tokens = min(float(self._ceiling), max(float(self.floor), wanted))
