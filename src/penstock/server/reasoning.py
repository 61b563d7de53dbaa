"""Reasoning of one answer: how its thoughts are read, and what the engine must know to keep them to a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.api.openai import ChatRequest
from penstock.api.openai.reasoning import ReasoningAsked
from penstock.core.thinking import Thinking
from penstock.server.served_model import ServedModel
from penstock.server.tool_calling import ToolCalling
from penstock.text.reasoning import AnswerParser, ReasoningFormat, ReasoningTracker
from penstock.text.reasoning.harmony import BEGUN, CHANNEL, MESSAGE, TO_CALL
from penstock.text.tokenizer import Tokenizer

_LAST_IDS = 16  # of a prompt, in which it is told whether its template opens the model's thoughts


@dataclass(frozen=True)
class ReasoningLimits:
    """An operator's."""

    default: int | None = None  # tokens of thoughts where the request names no budget; None: as many as the model takes
    most: int | None = None  # of any request; None: no limit

    def budget(self, asked: int | None) -> int | None:
        wanted = self.default if asked is None else asked
        return wanted if self.most is None or (wanted is not None and wanted <= self.most) else self.most


@dataclass(frozen=True)
class Reasoning:
    format: ReasoningFormat
    asked: ReasoningAsked
    prompt_end: str
    budget: int | None
    is_required_call: bool = False

    @classmethod
    def from_chat(
        cls, chat: ChatRequest, model: ServedModel, prompt_ids: list[int], limits: ReasoningLimits
    ) -> Reasoning | None:
        """None: the model does not reason, as far as is known."""
        known, asked = model.chat_template.reasoning, chat.reasoning_asked()
        if known is None:
            return None
        end = model.tokenizer.decode(prompt_ids[-_LAST_IDS:], skip_special_tokens=False)
        if chat.continue_final_message:
            end = _end_of_begun(known, str(chat.conversation()[-1]["content"]))
        return cls(known, asked, end, limits.budget(asked.budget), known.finds_calls and chat.must_call())

    def begun(self, tokenizer: Tokenizer, *, is_guided: bool) -> tuple[Reasoning, list[int]]:
        """The same with what the prompt is to end with besides: thoughts that may have no token are closed there, and
        a format whose messages name their purpose begins with thoughts where a call has to follow them, and else with
        a channel where there is a guide: no text may come before one."""
        text = ""
        if self.budget == 0 and self.format.splitter(self.prompt_end).is_inside:
            text = self.format.closing + self.format.gap
        elif self.is_required_call:
            text = f"{CHANNEL}analysis{MESSAGE}"
        elif is_guided and self.format.finds_calls and self.prompt_end.endswith(BEGUN):
            text = CHANNEL
        if not text:
            return self, []
        return replace(self, prompt_end=self.prompt_end + text), tokenizer.encode(text, add_special_tokens=False)

    @property
    def is_told_apart(self) -> bool:
        """Thoughts are parts of their own. A client may want them in the text, but not the marks of a format whose
        messages are more than thoughts and an answer."""
        return self.asked.is_separate or self.format.finds_calls

    def parser(self, calling: ToolCalling | None) -> AnswerParser:
        most = calling.max_calls if calling is not None else None
        if self.format.finds_calls:
            return AnswerParser(self.format.splitter(self.prompt_end, may_call=calling is not None), None, most)
        calls = calling.parser() if calling is not None else None
        return AnswerParser(self.format.splitter(self.prompt_end), calls, most)

    def tracker(self, tokenizer: Tokenizer) -> ReasoningTracker:
        return ReasoningTracker(self.format.splitter(self.prompt_end), tokenizer.token_bytes)

    def thinking(self, tokenizer: Tokenizer, *, is_guided: bool, may_call: bool) -> Thinking | None:
        """Thoughts' settings that the engine must know; None: nothing."""
        is_off = self.format.is_off(self.prompt_end)
        if is_off or (self.budget is None and not is_guided):
            return None
        tags = self.format.tags
        gap = self.format.gap
        if self.is_required_call:
            gap = TO_CALL
        elif self.format.finds_calls and may_call:
            gap = ""  # the model chooses between an answer and a call

        def encoded(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False) if text else []

        return Thinking(
            format=self.format.name,
            prompt_end=self.prompt_end,
            budget=self.budget,
            closing_ids=encoded(self.format.closing),
            gap_ids=encoded(gap) if is_guided else [],
            opening_ids=encoded(tags.opens[0]) if tags is not None else [],
            may_call=may_call,
        )


def _end_of_begun(known: ReasoningFormat, text: str) -> str:
    """The end of an answer that the client has begun: thoughts may be open in it."""
    tags = known.tags
    if tags is None:
        return text
    opened = max(text.rfind(mark) for mark in tags.opens)
    closed = max(text.rfind(mark) for mark in tags.closes)
    return tags.opens[0] if opened > closed else ""
