"""Thoughts are told apart from the answer, however the text is cut."""

import pytest

from penstock.text.reasoning import ReasoningSplitter, Said, opens_thoughts

CASES = [
    ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.\n", "Yes."),
    ("\nHm.</think>Yes.", True, "Hm.", "Yes."),
    ("  <think>a < b</think>c", False, "a < b", "c"),
    ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
    ("\n\nYes.", False, "", "\n\nYes."),
    ("<thin", False, "", "<thin"),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("", False, "", ""),
    ("<think></think>\n<think>x", False, "", "<think>x"),
]


@pytest.mark.parametrize(("text", "is_inside", "thought", "said"), CASES)
@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_the_parts_are_the_same_however_the_text_is_cut(
    text: str, is_inside: bool, thought: str, said: str, step: int
) -> None:
    splitter = ReasoningSplitter(is_inside=is_inside)
    parts = [part for at in range(0, len(text), step) for part in splitter.push(text[at : at + step])]
    parts += splitter.flush()
    assert "".join(part.text for part in parts if not isinstance(part, Said)) == thought
    assert "".join(part.text for part in parts if isinstance(part, Said)) == said
    assert all(part.text for part in parts)


def test_a_template_may_open_the_thoughts() -> None:
    assert opens_thoughts("<|im_start|>assistant\n<think>\n")
    assert not opens_thoughts("<|im_start|>assistant\n<think>\n\n</think>\n\n")
