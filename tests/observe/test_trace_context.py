"""W3C trace context: what is read is written again, and what cannot be read is no context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.observe.trace_context import TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01".encode()

ids = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")
span_ids = st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}")
letters = "abcdefghijklmnopqrstuvwxyz"
keys = st.text(f"{letters}0123456789_-*/", max_size=20).map(lambda rest: f"k{rest}".encode())
values = st.text(f"{letters} !#:;@~", max_size=20).map(lambda text: f"{text}.".encode())
states = st.dictionaries(keys, values, max_size=32).map(
    lambda members: b",".join(b"%b=%b" % member for member in members.items())
)


def headers_of(lines: bytes) -> dict[str, bytes]:
    found = dict(line.split(b": ", 1) for line in lines.split(b"\r\n") if line)
    return {name.decode().replace("trace", ""): value for name, value in found.items()}


@given(ids, span_ids, st.booleans(), states, st.booleans())
def test_what_is_sent_on_is_read_as_it_was(
    trace_id: str, span_id: str, is_sampled: bool, state: bytes, is_random: bool
) -> None:
    context = TraceContext(trace_id, span_id, is_sampled, state, is_random)
    assert parse(**headers_of(context.headers())) == context


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_nothing_that_is_sent_breaks_anything(parent: bytes, state: bytes) -> None:
    found = parse(parent, state)
    assert found is None or parse(**headers_of(found.headers())) == found
    known = parse(PARENT, state)
    assert known is not None
    assert known.headers().count(b"\r\n") <= 2  # whatever was in it


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00",
        PARENT[:-1],
        PARENT + b"0",
        PARENT + b"-more",
        PARENT.upper(),
        b" " + PARENT,
        PARENT + b"\n",
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"00-{TRACE}-{SPAN}-0x".encode(),
    ],
)
def test_a_parent_that_breaks_the_rules_is_none(parent: bytes) -> None:
    assert parse(parent) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-what-ever".encode()) == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize("state", [b"no equals sign", b"a=1,a=2", b"UPPER=1", b"a=", b"a=1\x00", b"a=" + b"x" * 300])
def test_a_state_that_breaks_the_rules_is_dropped_and_the_trace_goes_on(state: bytes) -> None:
    assert parse(PARENT, state) == TraceContext(TRACE, SPAN, True)


def test_of_too_many_members_of_a_state_the_first_are_kept() -> None:
    found = parse(PARENT, b",".join(b"k%d=1" % number for number in range(40)))
    assert found is not None
    assert found.state.count(b",") == 31
