"""Parts that an answer is made of: thoughts, where the model reasons; runs of text; and calls of tools.

A call is begun with its name, gets its arguments as text, a little at a time, and is ended. One that was cut short is
never ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model writes for itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int  # among the calls of the answer
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str  # of a JSON object, as the model wrote it


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int


Part = ReasoningText | Text | CallBegun | CallArguments | CallEnded


def add(parts: list[Part], part: Part) -> None:
    """Appends the part, joined with the last one if both are text of the same."""
    last = parts[-1] if parts else None
    if isinstance(part, Text) and isinstance(last, Text):
        parts[-1] = Text(last.text + part.text)
    elif isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
        parts[-1] = ReasoningText(last.text + part.text)
    elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
        parts[-1] = replace(last, text=last.text + part.text)
    else:
        parts.append(part)
