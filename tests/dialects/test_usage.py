from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dialects.usage import StreamTally, hide_usage
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from tests.dialects.servers import WORDS, FakeVllm

STREAM = FakeVllm().answer("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": True}})[1]


def test_a_usage_nobody_asked_for_becomes_a_comment_that_the_books_can_read() -> None:
    hidden = hide_usage(b"".join(STREAM))
    assert hidden.count(b"data: ") == len(STREAM) - 1
    assert hidden.endswith(b"data: [DONE]\n\n")
    assert find_usage(hidden) == TokenUsage(7, 5)
    crlf = b"".join(STREAM).replace(b"\n", b"\r\n")
    assert find_usage(hide_usage(crlf)) == TokenUsage(7, 5)


def test_what_only_looks_like_it_goes_through() -> None:
    for data in (b"".join(STREAM[:3]), b'data: {"choices":[],"usage":null}\n\n', b'data: {"choices":[], broken\n\n'):
        assert hide_usage(data) == data


@given(st.lists(st.integers(1, 200)))
def test_a_tally_counts_events_however_they_are_cut(cuts: list[int]) -> None:
    tally, rest = StreamTally(), b"".join(STREAM)
    for cut in cuts:
        tally.append(rest[:cut])
        rest = rest[cut:]
    tally.append(rest)
    assert tally.num_events == len(STREAM)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_a_tally_counts_events_however_their_lines_end_and_whatever_they_are_called(end: bytes) -> None:
    tally = StreamTally()
    tally.append(b"".join(STREAM).replace(b"\n", end))
    assert tally.num_events == len(STREAM)
    named = StreamTally()
    named.append(b'event: ping\ndata: {}\n\nevent: message_stop\ndata: {"data:":1}\n\n')
    assert named.num_events == 2


def test_a_stream_that_ends_early_is_billed_for_what_passed() -> None:
    tally = StreamTally()
    for event in STREAM[:4]:  # the role, and three words
        tally.append(event)
    assert tally.output_tokens == 3 < len(WORDS)
