"""The contract of a lease of the fleet, wherever it is kept: tests to import where a fixture `leases` makes keepers.

`leases` is called with a holder's name and a clock, in seconds, that the test moves. Keepers block, and so are called
in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.core.errors import LeaseLost
from penstock.tenancy.lease import LeaseKeeper

LEASE_S = 30.0  # by the clocks of the tests, and so as long as they want
Leases = Callable[[str, Callable[[], float]], LeaseKeeper]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write(keeper: LeaseKeeper) -> None:
    with keeper.fenced() as execute:
        execute("SELECT 1")


async def take(keeper: LeaseKeeper) -> bool:
    return await asyncio.to_thread(keeper.try_take)


async def test_of_two_controllers_one_acts_until_it_has_been_silent(leases: Leases) -> None:
    mine, yours = Clock(), Clock()
    first, second = leases("first", mine), leases("second", yours)
    assert not first.is_held
    assert await take(first)
    assert first.is_held
    assert not await take(second)
    for _ in range(3):
        mine.now += LEASE_S / 2
        yours.now += LEASE_S / 2
        await asyncio.to_thread(write, first)
        assert not await take(second)
    yours.now += LEASE_S
    assert await take(second)  # by its own clock the first has been silent
    with pytest.raises(LeaseLost):
        await asyncio.to_thread(write, first)
    await asyncio.to_thread(write, second)
    mine.now += LEASE_S
    assert not first.is_held
    assert not await take(first)


async def test_a_lease_that_was_released_is_taken_at_once(leases: Leases) -> None:
    clock = Clock()
    first, second = leases("first", clock), leases("second", clock)
    assert await take(first)
    assert not await take(second)
    await asyncio.to_thread(first.release)
    assert not first.is_held
    assert await take(second)
    with pytest.raises(LeaseLost):
        await asyncio.to_thread(write, first)


async def test_a_holder_that_takes_it_again_is_the_same(leases: Leases) -> None:
    clock = Clock()
    first = leases("first", clock)
    assert await take(first)
    assert await take(first)
    await asyncio.to_thread(write, first)


async def test_a_lease_that_was_not_renewed_in_time_writes_nothing(leases: Leases) -> None:
    clock = Clock()
    first = leases("first", clock)
    assert await take(first)
    clock.now += LEASE_S
    with pytest.raises(LeaseLost):
        await asyncio.to_thread(write, first)
    assert await take(first)  # nobody else has
