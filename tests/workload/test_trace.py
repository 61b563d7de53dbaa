import json
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.workload.trace import Arrival, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,0
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 600, "output_length": 6, "hash_ids": [0, 3]}
{"timestamp": 4000, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 2, 4]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_azure_trace_says_when_and_how_long_and_every_answer_has_a_token(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, "azure.csv", AZURE))
    assert first == Arrival(0.0, 374, 44, (), "s0")
    assert second.at_s == pytest.approx(4.314579)
    assert (second.output_tokens, second.session) == (1, "s1")


def test_a_mooncake_request_goes_on_with_the_conversation_whose_blocks_it_begins_with(tmp_path: Path) -> None:
    first = [(0, 10 * talk, 10 * talk + 1) for talk in range(1, 21)]  # what all begin with is nobody's
    second = [(*blocks, blocks[-1] + 1) for blocks in first]
    rows = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 5, "hash_ids": blocks}
        for n, blocks in enumerate([*first, *second])
    ]
    arrivals = read_trace(write(tmp_path, "mooncake.jsonl", "\n".join(map(json.dumps, rows))))
    assert [one.session for one in arrivals] == 2 * [f"s{n}" for n in range(20)]
    assert [one.at_s for one in arrivals] == list(range(40))
    assert arrivals[0].whole_blocks == (0, 10)  # the third is begun only


def test_a_part_of_a_trace_begins_at_zero(tmp_path: Path) -> None:
    (only,) = read_trace(write(tmp_path, "mooncake.jsonl", MOONCAKE), first=1, count=1)
    assert (only.at_s, only.prompt_tokens) == (0.0, 600)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
@pytest.mark.parametrize("text", ["", "no trace\nat all\n"])
def test_what_is_no_trace_is_a_clear_error(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"t\.(csv|jsonl)"):
        read_trace(write(tmp_path, name, text))


def test_a_trace_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "gone.jsonl")
