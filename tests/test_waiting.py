from __future__ import annotations

import pytest

from tests.waiting import eventually, eventually_async


def test_a_wait_ends_with_what_was_seen() -> None:
    seen = iter([0, 0, 3])
    assert eventually(lambda: next(seen)) == 3


def test_a_wait_that_fails_says_at_what_it_looked_and_what_it_last_saw() -> None:
    state = {"open": 7}
    with pytest.raises(AssertionError, match=r"1 looks.*state\[.open.\].*wanted.*== 2.*saw 7"):
        eventually(lambda: state["open"], lambda number: number == 2, within_s=0)


async def test_a_loop_goes_on_while_a_test_waits() -> None:
    seen = iter(["", "here"])
    assert await eventually_async(lambda: next(seen)) == "here"
    with pytest.raises(AssertionError, match="saw False"):
        await eventually_async(lambda: False, within_s=0)
