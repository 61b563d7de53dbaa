"""Thoughts of one answer, as its engine must know them: how long they may be, and when a guide begins after them."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    format: str  # one of `text.reasoning.FORMATS`
    prompt_end: str  # its last characters, in which the model's thoughts may have been opened
    budget: int | None = None  # tokens of thoughts; None: no limit
    closing_ids: list[int] = []  # they end thoughts whose budget is used up
    gap_ids: list[int] = []  # they follow the end of the thoughts, before a guide begins
    opening_ids: list[int] = []  # they open thoughts, where the model does that itself
    may_call: bool = False  # calls of tools are no part of the answer's text
