from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.workload.lengths import Lengths
from penstock.workload.own import Own, read_own
from penstock.workload.words import COMMON, Scale

LINES = """{"prompt": "one", "output_tokens": 5, "session": "a"}
{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two"}], "body": {"top_p": 0.5}}

{"turns": [{"prompt_tokens": 9}, {"prompt": "and then?", "think_s": 1.5, "output_tokens": 2}]}
"""


def own(folder: Path, text: str, **options: int) -> Own:
    path = folder / "own.jsonl"
    path.write_text(text)
    return Own(read_own(path, **options), COMMON, Scale(), "seed", Lengths.parse("7"), speed=2.0)


def test_a_line_is_a_prompt_or_messages_or_turns(tmp_path: Path) -> None:
    source = own(tmp_path, LINES)
    first, second, third = (source.conversation(number) for number in range(3))
    assert first.turns[0].messages == ({"role": "user", "content": "one"},)
    assert (first.turns[0].output_tokens, first.session) == (5, "a")
    assert [message["role"] for message in second.turns[0].messages] == ["system", "user"]
    assert (second.turns[0].output_tokens, second.turns[0].body) == (7, {"top_p": 0.5})
    assert len(str(third.turns[0].messages[0]["content"]).split()) == 9
    assert (third.turns[1].think_s, third.turns[1].output_tokens) == (1.5, 2)


def test_after_the_last_line_comes_the_first_again(tmp_path: Path) -> None:
    source = own(tmp_path, LINES, first=1)
    assert source.num_lines == 2
    assert source.count is None
    assert source.conversation(2).turns == source.conversation(0).turns


def test_lines_with_times_are_replayed_in_their_order(tmp_path: Path) -> None:
    source = own(tmp_path, '{"prompt": "late", "at_s": 4}\n{"prompt": "early", "at_s": 1}\n')
    assert source.count == 2
    assert [source.at_s(number) for number in range(2)] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1"),
        ('{"prompt": "a", "max_tokens": 5}', "max_tokens"),
        ('{"output_tokens": 5}', "one of prompt, messages and prompt_tokens"),
        ('{"prompt": "a", "prompt_tokens": 5}', "one of prompt"),
        ('{"turns": []}', "no turns"),
        ('{"turns": [{"prompt": "a"}], "prompt": "b"}', "beside them"),
        ('{"prompt_tokens": 0}', "at least 1"),
        ("", "no requests"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        own(tmp_path, line + "\n")
