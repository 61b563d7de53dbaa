"""Token budget of a step: the chunk size, tightened while steps take longer than the target time per output token."""

from __future__ import annotations


class StepRoom:
    """Tokens that a step may still carry besides its decodes. Resumed streams may fill it to the chunk size, however
    long it then takes: in many short steps the decodes beside them are what most of the time goes to, and all wait."""

    __slots__ = ("_full", "_paced")

    def __init__(self, paced: int, full: int) -> None:
        self._paced = paced  # for all others: as the target per token asks
        self._full = max(paced, full)

    def left(self, *, goes_first: bool) -> int:
        return self._full if goes_first else min(self._paced, self._full)

    def widen(self, tokens: int) -> None:
        """Raise what is left to at least `tokens`, for resumed streams and all others."""
        self._paced, self._full = max(self._paced, tokens), max(self._full, tokens)

    def take(self, tokens: int) -> None:
        self._paced -= tokens
        self._full -= tokens


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
        """Number of tokens that a step with decodes in it may carry."""
        return int(self._tokens)

    def tokens_beside(self, num_decodes: int) -> int:
        """Number of tokens a step may carry besides its decodes; with none, nobody waits for it and it may be full."""
        return int(self._tokens) - num_decodes if num_decodes else self._ceiling

    def room_beside(self, num_decodes: int) -> StepRoom:
        return StepRoom(self.tokens_beside(num_decodes), self._ceiling - num_decodes)

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
