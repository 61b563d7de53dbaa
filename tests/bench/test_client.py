from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.client import Recording, RequestFailed, digest

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def event(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": None}], usage=None)


ANSWER = [text("a"), text("bé"), text("c"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n"]


def recorded(chunks: list[bytes], sent_s: float = 10.0) -> Recording:
    """Each chunk arrives a second after the one before."""
    return Recording(sent_s, [(sent_s + 1 + index, chunk) for index, chunk in enumerate(chunks)])


def test_times_are_those_of_the_first_and_the_last_text() -> None:
    answer = digest(recorded(ANSWER))
    assert (answer.ttft_s, answer.tpot_s) == (1.0, 1.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 8, 3)


def test_tokens_are_counted_by_usage_and_not_by_chunks() -> None:
    answer = digest(recorded([text("a"), text("b and c"), event(choices=[], usage=USAGE)]))
    assert answer.tpot_s == 0.5


@given(cuts=st.sets(st.integers(1, len(b"".join(ANSWER)) - 1)))
def test_events_may_be_cut_anywhere(cuts: set[int]) -> None:
    stream = b"".join(ANSWER)
    edges = [0, *sorted(cuts), len(stream)]
    answer = digest(recorded([stream[start:end] for start, end in pairwise(edges)]))
    assert answer.output_tokens == 3


def test_a_text_counts_when_its_event_is_complete() -> None:
    assert digest(recorded([ANSWER[0][:9], ANSWER[0][9:], *ANSWER[1:]])).ttft_s == 2.0


def test_an_empty_first_chunk_is_no_first_token() -> None:
    assert digest(recorded([text(""), *ANSWER])).ttft_s == 2.0


def test_carriage_returns_comments_and_other_fields_are_no_matter() -> None:
    stream = b": ping\r\n\r\nevent: message\r\n" + b"".join(ANSWER).replace(b"\n", b"\r\n")
    assert digest(recorded([stream])).output_tokens == 3


def test_a_single_token_has_no_time_between_tokens() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    assert digest(recorded([text("a"), event(choices=[], usage=usage)])).tpot_s is None


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([], "no text"),
        ([event(choices=[], usage=USAGE)], "no text"),
        (ANSWER[:3], "no usage"),
        ([text("a"), event(error={"message": "engine died"})], "engine died"),
        ([b"data: {broken\n\n"], "broken"),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_failure(chunks: list[bytes], reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        digest(recorded(chunks))
