from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import server_timing

names = st.text(st.characters(codec="ascii", categories=["Ll", "Nd"], include_characters="_"), min_size=1, max_size=12)


@given(st.dictionaries(names, st.floats(0, 1000), max_size=6))
def test_what_a_replica_says_is_what_a_gateway_reads(parts: dict[str, float]) -> None:
    read = server_timing.decode(server_timing.encode(parts))
    assert list(read) == list(parts)
    assert all(read[name] == pytest.approx(parts[name], abs=1.001e-6) for name in parts)


@given(st.dictionaries(names, st.floats(0, 10), max_size=6))
def test_parts_add_up_to_their_rounded_sum(parts: dict[str, float]) -> None:
    read = server_timing.decode(server_timing.encode(parts))
    *_, total_s = accumulate(parts.values(), initial=0.0)
    assert round(1e6 * sum(read.values())) == round(1e6 * total_s)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b";;,",
        b";dur=3",
        b"db;x=3",
        b"cache",
        b"db;dur=x",
        b"db;dur=-1",
        b"db;dur=nan",
        b"db;dur=1e99",
        b"\xff;dur",
        b'a;desc="b"',
    ],
)
def test_what_is_no_duration_is_left_out(header: bytes) -> None:
    assert server_timing.decode(header) == {}


def test_other_parameters_and_spaces_are_skipped() -> None:
    assert server_timing.decode(b'db; desc="a b" ; dur="512" , app;DUR=1') == {"db": 0.512, "app": 0.001}


@given(st.binary(max_size=60))
def test_no_header_is_too_strange(header: bytes) -> None:
    assert all(0 <= seconds < 1e6 for seconds in server_timing.decode(header).values())
