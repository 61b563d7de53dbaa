"""Formats of thoughts by family of models, and which of them a model has: by name, or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text.reasoning import harmony
from penstock.text.reasoning.harmony import HarmonySplitter
from penstock.text.reasoning.splitter import Splitter
from penstock.text.reasoning.tags import Tags, TagSplitter


@dataclass(frozen=True)
class ReasoningFormat:
    """`tags` is None for harmony, whose channels are more than two marks."""

    name: str
    tags: Tags | None = None
    marks: tuple[str, ...] = ()  # texts that may be special tokens of the model: they are read and not skipped
    stops: tuple[str, ...] = ()  # special tokens that end an answer
    closing: str = ""  # what ends thoughts whose budget is used up
    gap: str = ""  # what models write between the end of their thoughts and the answer

    def splitter(self, prompt_end: str, *, may_call: bool = False) -> Splitter:
        """Splitter of an answer that goes on after this prompt."""
        if self.tags is None:
            return HarmonySplitter(prompt_end, may_call=may_call)
        return TagSplitter(self.tags, is_inside=self.tags.opens_at_end(prompt_end))

    @property
    def finds_calls(self) -> bool:
        """Its splitter tells calls of tools too."""
        return self.tags is None

    def is_off(self, prompt_end: str) -> bool:
        """The prompt ends with thoughts that are over: there will be none."""
        return self.tags is not None and self.tags.closes_at_end(prompt_end)


def _tagged(name: str, tags: Tags, *, closing: str, gap: str = "") -> ReasoningFormat:
    return ReasoningFormat(name, tags, (*tags.opens, *tags.closes, *(tags.answer or ())), closing=closing, gap=gap)


THINK = _tagged("think", Tags(), closing="\n</think>", gap="\n\n")
SEED = _tagged("seed", Tags(("<seed:think>",), ("</seed:think>",)), closing="\n</seed:think>", gap="")
MISTRAL = _tagged("mistral", Tags(("[THINK]",), ("[/THINK]",)), closing="[/THINK]")
GRANITE = _tagged(
    "granite",
    Tags(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        gap=" \n",
    ),
    closing="\n\nHere is my response:",
    gap="\n\n",
)
GRANITE_TAGS = _tagged("granite_tags", Tags(answer=("<response>", "</response>")), closing="\n</think>", gap="")
HUNYUAN = _tagged("hunyuan", Tags(answer=("<answer>", "</answer>")), closing="\n</think>", gap="\n")
HARMONY = ReasoningFormat(
    "harmony",
    marks=harmony.MARKS,
    stops=harmony.STOPS,
    closing=harmony.END,
    gap=harmony.TO_FINAL,
)

FORMATS = {known.name: known for known in (THINK, SEED, MISTRAL, GRANITE, GRANITE_TAGS, HUNYUAN, HARMONY)}


def choose(template: str, name: str | None = None) -> ReasoningFormat | None:
    """Format by name, `none` among them, or else by what the chat template gives away. None: the model does not reason,
    or its thoughts stay in its answer."""
    if name in FORMATS or name == "none":
        return FORMATS.get(name)
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return HARMONY
    if "[THINK]" in template:
        return MISTRAL
    if "<seed:think>" in template:
        return SEED
    if "<think>" in template:
        if "<response>" in template:
            return GRANITE_TAGS
        return HUNYUAN if "<answer>" in template else THINK
    return GRANITE if "Here is my thought process:" in template else None
