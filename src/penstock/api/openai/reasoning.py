"""Reasoning options, by which clients of the chat API ask a model to reason, or not to, and for how long.

There is no one way: OpenAI has `reasoning_effort`, DeepSeek and others `thinking`, Qwen `enable_thinking` and
`thinking_budget`, vLLM `thinking_token_budget`, SGLang `separate_reasoning`, and OpenRouter an object `reasoning`.
All of it comes down to one `ReasoningAsked`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from penstock.api.decoding import NoEffect, NotBuilt, Refused, WireStruct
from penstock.api.openai.generation import Count, GenerationRequest

ReasoningEffort = Annotated[str, Meta(min_length=1, max_length=32)]  # a template knows which there are
BUDGETS = ("max_reasoning_tokens", "thinking_budget", "thinking_token_budget")


class ReasoningAsked(NamedTuple):
    effort: str | None = None
    is_on: bool | None = None  # None: as the model's template has it
    budget: int | None = None  # tokens of thoughts; None: the server's own
    is_shown: bool = True  # False: the client is not sent the thoughts
    is_separate: bool = True  # False: they stay in the answer, marks and all

    def variables(self) -> dict[str, Any]:
        """Variables of chat templates, under the names that families have for them. Some read how much a model is to
        reason, some only whether; a template that reads neither says the same at every effort."""
        found: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": self.effort}
        is_on = self.is_on if self.is_on is not None or self.effort is None else self.effort != "none"
        return found if is_on is None else found | {"enable_thinking": is_on, "thinking": is_on}


class ThinkingOption(WireStruct):
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None  # Anthropic's
    clear_thinking: Annotated[bool | None, NoEffect("the template decides which earlier thoughts are told")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type == "disabled" and self.budget_tokens is not None:
            raise Refused("budget_tokens", "cannot go with type disabled")

    @property
    def is_on(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningOptions(WireStruct):
    """OpenRouter's."""

    effort: ReasoningEffort | None = None
    max_tokens: Count | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: Annotated[Any, NotBuilt("auto")] = None


class ReasoningRequest(GenerationRequest, kw_only=True):
    """A request to a model that may reason."""

    reasoning_effort: ReasoningEffort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOption | None = None
    enable_thinking: bool | None = None
    max_reasoning_tokens: Count | None = None  # penstock's own; the next two are others' names of it
    thinking_budget: Count | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: Annotated[bool | None, NotBuilt(True)] = None

    def reasoning_asked(self) -> ReasoningAsked:
        thinking, options = self.thinking, self.reasoning or ReasoningOptions()
        budgets = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        if thinking is not None and thinking.budget_tokens is not None:
            budgets["thinking.budget_tokens"] = thinking.budget_tokens
        if options.max_tokens is not None:
            budgets["reasoning.max_tokens"] = options.max_tokens
        switches = {"enable_thinking": self.enable_thinking, "reasoning.enabled": options.enabled}
        switches["thinking"] = thinking.is_on if thinking is not None else None
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": options.effort}
        is_hidden = thinking is not None and thinking.display == "omitted"
        return ReasoningAsked(
            effort=_one_of(efforts),
            is_on=_one_of(switches),
            budget=_one_of(budgets),
            is_shown=self.include_reasoning is not False and not options.exclude and not is_hidden,
            is_separate=self.separate_reasoning is not False,
        )


def _one_of(given: dict[str, Any]) -> Any:
    """The value that is given, under whichever names."""
    found = {name: value for name, value in given.items() if value is not None}
    first = next(iter(found), None)
    for name, value in found.items():
        if value != found[first or name]:
            raise Refused(name, f"differs from {first}; give one of them")
    return found[first] if first is not None else None
