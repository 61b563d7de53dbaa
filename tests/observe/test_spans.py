"""Whose trace a request is part of, and whether it is kept."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.spans import Root, Roots, Sampling

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def sent(flags: str = "01") -> dict[bytes, bytes]:
    return {b"traceparent": f"00-{TRACE}-{SPAN}-{flags}".encode(), b"tracestate": b"a=1"}


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_clients_trace_is_gone_on_with_as_sampled_as_it_says(ratio: float, flags: str, is_sampled: bool) -> None:
    root = Roots(Sampling(ratio)).begin(sent(flags))
    assert (root.trace_id, root.parent_id, root.is_sampled, root.state) == (TRACE, SPAN, is_sampled, b"a=1")
    assert root.span_id not in (SPAN, "")
    child = root.child("1" * 16)
    assert (child.trace_id, child.span_id, child.is_sampled, child.state) == (TRACE, "1" * 16, is_sampled, b"a=1")


@pytest.mark.parametrize("headers", [{}, {b"traceparent": b"rubbish"}])
def test_who_has_no_trace_gets_one(headers: dict[bytes, bytes]) -> None:
    roots = Roots(Sampling())
    first, second = roots.begin(headers), roots.begin(headers)
    assert first.trace_id != second.trace_id
    assert first.parent_id == ""
    assert len(first.trace_id) == 32
    assert first.is_sampled
    assert first.is_random


@given(st.floats(0, 1), st.integers(0, 1000))
def test_the_share_that_is_sampled_is_the_one_that_was_set(ratio: float, seed: int) -> None:
    roots = Roots(Sampling(ratio), Random(seed))
    share = sum(roots.begin({}).is_sampled for _ in range(500)) / 500
    assert abs(share - ratio) < 0.12
    assert ratio not in (0.0, 1.0) or share == ratio


@given(st.floats(0, 1), st.integers(1, 2**128 - 1))
def test_all_who_sample_by_a_traces_id_agree(ratio: float, trace: int) -> None:
    headers = {b"traceparent": f"00-{trace:032x}-{SPAN}-00".encode()}
    first, second = (Roots(Sampling(ratio, follows_parent=False)).begin(headers) for _ in range(2))
    assert first.is_sampled == second.is_sampled


def test_a_client_that_is_not_trusted_gets_a_trace_of_our_own_with_a_link_to_its() -> None:
    root = Roots(Sampling(0.0, continues=False)).begin(sent())
    assert root.trace_id != TRACE
    assert root.parent_id == ""
    assert not root.is_sampled
    assert root.link is not None
    assert root.link.trace_id == TRACE


@pytest.mark.parametrize(
    ("is_sampled", "has_failed", "ttft_s", "total_s", "is_kept"),
    [
        (True, False, 0.1, 1.0, True),
        (False, False, 0.1, 1.0, False),
        (False, True, None, None, True),
        (False, False, 2.0, 2.5, True),
        (False, False, None, 60.0, True),
        (False, False, None, None, False),
    ],
)
def test_what_failed_or_was_slow_is_kept_whether_sampled_or_not(
    is_sampled: bool, has_failed: bool, ttft_s: float | None, total_s: float | None, is_kept: bool
) -> None:
    root = Root(TRACE, SPAN, "", is_sampled)
    assert Sampling().keeps(root, has_failed=has_failed, ttft_s=ttft_s, total_s=total_s) == is_kept
