from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.answer import Reader, digest
from penstock.bench.client import Recording, RequestFailed

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def event(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value, "finish_reason": None}], usage=None)


ANSWER = [text("a"), text("bé"), text("c"), event(choices=[], usage=USAGE), b"data: [DONE]\n\n"]


def recorded(chunks: list[bytes], sent_s: float = 10.0) -> Recording:
    """Each chunk arrives a second after the one before."""
    recording = Recording(sent_s)
    recording.times = [sent_s + 1 + index for index in range(len(chunks))]
    recording.parts = chunks
    return recording


def test_times_are_those_of_the_first_and_the_last_text() -> None:
    answer = digest(recorded(ANSWER))
    assert (answer.first_s, answer.last_s, list(answer.gaps)) == (11.0, 13.0, [1.0, 1.0])
    assert answer.text == "abéc"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 8, 3)


def test_tokens_are_counted_by_usage_and_not_by_chunks() -> None:
    answer = digest(recorded([text("a"), text("b and c"), event(choices=[], usage=USAGE)]))
    assert (answer.output_tokens, answer.num_pieces) == (3, 2)


@given(cuts=st.sets(st.integers(1, len(b"".join(ANSWER)) - 1)))
def test_events_may_be_cut_anywhere(cuts: set[int]) -> None:
    stream = b"".join(ANSWER)
    edges = [0, *sorted(cuts), len(stream)]
    answer = digest(recorded([stream[start:end] for start, end in pairwise(edges)]))
    assert answer.output_tokens == 3


def test_a_text_counts_when_its_event_is_complete() -> None:
    assert digest(recorded([ANSWER[0][:9], ANSWER[0][9:], *ANSWER[1:]])).first_s == 12.0


def test_an_empty_first_chunk_is_no_first_token() -> None:
    assert digest(recorded([text(""), *ANSWER])).first_s == 12.0


def test_carriage_returns_comments_and_other_fields_are_no_matter() -> None:
    stream = b": ping\r\n\r\nevent: message\r\n" + b"".join(ANSWER).replace(b"\n", b"\r\n")
    assert digest(recorded([stream])).output_tokens == 3


def test_several_tokens_in_one_read_have_no_gap_between_them() -> None:
    answer = digest(recorded([text("a") + text("b"), text("c"), b"data: [DONE]\n\n"]))
    assert (answer.num_pieces, list(answer.gaps)) == (3, [1.0])


def test_a_chat_speaks_in_deltas_and_its_reasoning_is_output_but_no_part_of_the_answer() -> None:
    thought = event(choices=[{"delta": {"role": "assistant", "reasoning_content": "hm"}}])
    said = event(choices=[{"delta": {"content": "yes"}, "finish_reason": "stop"}])
    answer = digest(recorded([thought, said, event(choices=[], usage=USAGE)]))
    assert (answer.first_s, answer.last_s, answer.text) == (11.0, 12.0, "yes")


def test_a_server_that_reports_no_usage_has_its_texts_counted() -> None:
    answer = digest(recorded([*ANSWER[:3], b"data: [DONE]\n\n"]))
    assert (answer.output_tokens, answer.prompt_tokens, answer.num_pieces) == (None, None, 3)


def test_tokens_without_a_text_came_with_the_last_event() -> None:
    """A single token may be a part of a character."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    last = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
    assert digest(recorded([last, event(choices=[], usage=usage)])).first_s == 11.0


def test_a_long_answer_can_be_read_in_parts() -> None:
    reader = Reader(recorded(ANSWER))
    assert reader.read(2)
    while reader.read(2):
        pass
    assert reader.answer().text == "abéc"


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([], "no text"),
        ([event(choices=[], usage={**USAGE, "completion_tokens": 0})], "no text"),
        (ANSWER[:3], "without its last event"),
        ([text("a"), event(error={"message": "engine died"})], "engine died"),
        ([b"data: {broken\n\n"], "broken"),
    ],
)
def test_an_answer_that_cannot_be_used_is_a_failure(chunks: list[bytes], reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        digest(recorded(chunks))
