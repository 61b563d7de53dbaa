"""Fill-in-the-middle: how a model is asked for the text between two others, by marks that its vocabulary has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class FillInMarks(NamedTuple):
    """Special tokens, as text: before the first text, between the two, and where the answer begins."""

    prefix: str
    suffix: str
    middle: str

    def prompt(self, before: str, after: str) -> str:
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"


_KNOWN = (
    FillInMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    FillInMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek coder
)


def find_marks(is_mark: Callable[[str], bool]) -> FillInMarks | None:
    """`is_mark`: whether a text is one of the vocabulary's added tokens, which a prompt is searched for."""
    return next((marks for marks in _KNOWN if all(map(is_mark, marks))), None)
