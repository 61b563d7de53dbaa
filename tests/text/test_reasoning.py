"""Thoughts are told apart from the answer, however the text is cut and whatever the family."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.reasoning import FORMATS, AnswerParser, ReasoningTracker, choose
from penstock.text.tools import CallArguments, CallBegun, CallEnded, Part, ReasoningText, Text
from penstock.text.tools import choose as choose_tools
from penstock.text.tools.parts import add

OPENED = "<|im_start|>assistant\n<think>\n"
ASSISTANT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
CALLED: list[Part] = [CallBegun(0, "get_weather"), CallArguments(0, '{"city": "Rome"}'), CallEnded(0)]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
CASES: list[tuple[str, str, str, list[Part]]] = [
    ("think", "", "<think>\nHm.\n</think>\n\nYes.", [ReasoningText("Hm.\n"), Text("Yes.")]),
    ("think", OPENED, "\nHm.</think>Yes.", [ReasoningText("Hm."), Text("Yes.")]),
    ("think", "", "  <think>a < b</think>c", [ReasoningText("a < b"), Text("c")]),
    ("think", "", "Yes. <think>no</think>", [Text("Yes. <think>no</think>")]),
    ("think", "", "\n\nYes.", [Text("\n\nYes.")]),
    ("think", "", "<thin", [Text("<thin")]),
    ("think", "", "<think>cut </thi", [ReasoningText("cut </thi")]),
    ("think", "", "", []),
    ("think", "", "<think></think>\n<think>x", [Text("<think>x")]),
    ("seed", "", "<seed:think>a</think></seed:think>b", [ReasoningText("a</think>"), Text("b")]),
    ("mistral", "", "[THINK]a[/TH[/THINK]b [THINK]", [ReasoningText("a[/TH"), Text("b [THINK]")]),
    ("granite", "", "Here is my thought process: a\nHere's my response: b", [ReasoningText("a\n"), Text("b")]),
    ("granite", "", "Here is my cat.", [Text("Here is my cat.")]),
    ("granite_tags", "", "<think>a</think><response>b</response>", [ReasoningText("a"), Text("b")]),
    ("granite_tags", "", "<think>a</think> <resp", [ReasoningText("a"), Text(" <resp")]),
    ("hunyuan", "", "<think>\na\n</think>\n<answer>\nb\n</answer>", [ReasoningText("a\n"), Text("b")]),
    ("hunyuan", "", "<think>a</think>b</answer>", [ReasoningText("a"), Text("b</answer>")]),
    ("hunyuan", "", "<answer>b</answer>", [Text("<answer>b</answer>")]),
    (
        "harmony",
        ASSISTANT,
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.",
        [ReasoningText("Hm."), Text("Yes.")],
    ),
    ("harmony", ASSISTANT, f"{THOUGHT}<|start|>assistant{CALL}", [ReasoningText("Hm."), *CALLED]),
    (
        "harmony",
        ASSISTANT,
        f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}<|call|>",
        [ReasoningText("Hm."), Text("Wait."), *CALLED],
    ),
    ("harmony", ASSISTANT, f"{THOUGHT}<|start|>assistant{THOUGHT}", [ReasoningText("Hm.\nHm.")]),
    (
        "harmony",
        ASSISTANT,
        " to=functions.now<|channel|>commentary<|message|>",
        [CallBegun(0, "now"), CallArguments(0, "{}"), CallEnded(0)],
    ),
    ("harmony", ASSISTANT, "<|channel|>analysis to=browser.open code<|message|>{}", [ReasoningText("{}")]),
    ("harmony", f"{ASSISTANT}<|channel|>analysis<|message|>", "Hm.<|end|>", [ReasoningText("Hm.")]),
    ("harmony", ASSISTANT, "No header.", [Text("No header.")]),
    ("harmony", ASSISTANT, "assist", [Text("assist")]),
    ("harmony", ASSISTANT, "<|channel|>fin", []),
    ("harmony", ASSISTANT, "<|channel|>final<|message|>Yes.<|channel|>final<|message|>No.", [Text("Yes.\nNo.")]),
]


def parts_of(name: str, prompt_end: str, pieces: list[str], *, is_cut: bool = False) -> list[Part]:
    parser = AnswerParser(FORMATS[name].splitter(prompt_end, may_call=True), None)
    found: list[Part] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush(is_cut=is_cut):
        add(found, part)
    return found


@pytest.mark.parametrize(("name", "prompt_end", "text", "parts"), CASES)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_the_parts_are_the_same_however_the_text_is_cut(
    name: str, prompt_end: str, text: str, parts: list[Part], step: int
) -> None:
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    assert parts_of(name, prompt_end, pieces) == parts


def _fragments(name: str) -> list[str]:
    known = FORMATS[name]
    marks = [
        *known.marks,
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "assistant",
        "a",
        " ",
        "\n",
        "é",
        "b c",
    ]
    return [*marks, *(mark[:-1] for mark in known.marks), *(mark[1:] for mark in known.marks)]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_chunking_gives_the_same_parts(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_fragments(name)), max_size=20)))
    prompt_end = data.draw(st.sampled_from(["", OPENED, ASSISTANT, f"{ASSISTANT}<|channel|>analysis<|message|>"]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    is_cut = data.draw(st.booleans())
    whole = parts_of(name, prompt_end, [text], is_cut=is_cut)
    assert parts_of(name, prompt_end, pieces, is_cut=is_cut) == whole
    assert all(part.text for part in whole if isinstance(part, Text | ReasoningText))


def test_a_call_that_was_cut_is_not_ended() -> None:
    assert parts_of("harmony", ASSISTANT, [CALL], is_cut=True) == CALLED[:-1]


def test_a_message_to_a_function_that_nobody_offers_is_text() -> None:
    parser = AnswerParser(FORMATS["harmony"].splitter(ASSISTANT), None)
    assert parser.push(CALL) == [Text('{"city": "Rome"}')]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_budget_forces_ends_the_thoughts(name: str) -> None:
    known = FORMATS[name]
    opening = "<|channel|>analysis<|message|>" if known.tags is None else known.tags.opens[0]
    splitter = known.splitter(ASSISTANT)
    splitter.push(f"{opening}Hm")
    assert splitter.is_inside
    splitter.push(known.closing)
    assert not splitter.is_inside
    splitter.push(known.gap)
    assert splitter.is_answering


def test_tokens_of_thoughts_are_counted_with_the_mark_that_ends_them() -> None:
    tokens = [b"<th", b"ink>", b"H\xc3", b"\xa9", b"m", b"</", b"think>", b"\n", b"Yes"]
    tracker = ReasoningTracker(FORMATS["think"].splitter(""), tokens.__getitem__)
    insides, wholes = [], []
    for token_id in range(len(tokens)):
        tracker.take(token_id)
        insides.append(tracker.is_inside)
        wholes.append(tracker.is_whole)
    assert insides == [False, True, True, True, True, True, False, False, False]
    assert wholes == [True, True, False, True, True, True, True, True, True]
    assert tracker.num_tokens == 5


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ x }}<think>\n", "think"),
        ("[INST][THINK]", "mistral"),
        ("<seed:think>", "seed"),
        ('"Here is my thought process:"', "granite"),
        ("<think></think> and <response></response>", "granite_tags"),
        ("<think> <answer>", "hunyuan"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|im_start|>", None),
    ],
)
def test_a_template_gives_its_format_away(template: str, name: str | None) -> None:
    found = choose(template)
    assert (found.name if found is not None else None) == name


def test_a_format_can_be_named_or_switched_off() -> None:
    assert choose("<think>", "none") is None
    assert choose("", "mistral") is FORMATS["mistral"]
    assert choose("<think>", "of a newer replica") is FORMATS["think"]
    assert choose_tools("<|channel|><|message|>").name == "harmony"
