"""A long list whose members are told while its bytes come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.json_members import JsonMembers
from penstock.core.errors import InvalidRequest

values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\{}[],\u00e9\n')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def members(body: bytes, size: int = 1 << 20, max_bytes: int = 10_000) -> list[bytes]:
    found: list[bytes] = []
    reader = JsonMembers("requests", found.append, max_bytes)
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    reader.close()
    return found


@given(
    st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), max_size=4), st.integers(1, 30), st.booleans()
)
def test_members_come_out_as_they_went_in_however_they_are_cut(asked: list[Any], size: int, is_indented: bool) -> None:
    body = json.dumps({"requests": asked}, indent=2 if is_indented else None, ensure_ascii=is_indented).encode()
    assert [json.loads(one) for one in members(body + b"\n", size)] == asked


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"requests"',
        b'{"requests": {',
        b'{"requests": [{}',
        b'{"requests": [{} {}]}',
        b'{"requests": [,{}]}',
        b'{"requests": ["x"]}',
        b'{"requests": [{}]',
        b'{"requests": [{}], "more": 1}',
        b'{"requests": [{}]} x',
        b'{"requests": [{"x": "' + b"y" * 20_000,
        b" " * 2000,
    ],
)
def test_what_is_no_such_list_is_refused(body: bytes) -> None:
    for size in (1 << 20, 3):
        with pytest.raises(InvalidRequest):
            members(body, size)
