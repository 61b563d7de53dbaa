"""One limiter for the processes of a host, with real processes: shared exactly, and handed on when its process dies."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import pytest

from penstock.tenancy.limits.host import LEASE_S
from penstock.tenancy.limits.quota import NOBODY, Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.shared import BEAT_S, PATIENCE_S, RETRY_S, SharedLimiter
from tests.tenancy.limits.answers import answered, granted, refused
from tests.tenancy.limits.crowd import LIMIT, Crowd
from tests.virtual_time import SteppedClock
from tests.waiting import eventually_async


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def pair(tmp_path: Path, clock: SteppedClock) -> AsyncIterator[tuple[SharedLimiter, SharedLimiter]]:
    host, guest = SharedLimiter(tmp_path, clock=clock), SharedLimiter(tmp_path, clock=clock)
    await host.start()
    await guest.start()
    yield host, guest
    await guest.close()
    await host.close()


async def until_heard(guest: SharedLimiter) -> None:
    """Until the host has done all that this guest has asked of it: it answers in order."""
    await granted(guest.reserve("somebody else", Quota(), 0))


async def test_host_and_guest_draw_on_the_same_limits(pair: tuple[SharedLimiter, SharedLimiter]) -> None:
    host, guest = pair
    assert host.is_host
    assert not guest.is_host
    quota = Quota(tokens=Rate(60), concurrency=3)
    held = await granted(guest.reserve("acme", quota, 60))
    await refused(host.reserve("acme", quota, 4))
    guest.settle(held, 1)
    guest.settle(held, 0)
    await until_heard(guest)
    await granted(host.reserve("acme", quota, 59))


async def test_hundreds_of_asks_of_one_turn_share_a_frame_and_each_gets_its_answer(
    pair: tuple[SharedLimiter, SharedLimiter],
) -> None:
    _, guest = pair
    quota = Quota(concurrency=200)
    answers = await asyncio.gather(*(answered(guest.reserve("acme", quota, 1)) for _ in range(500)))
    assert sum(isinstance(answer, Refusal) for answer in answers) == 300


async def test_an_ask_that_was_cancelled_is_given_back(pair: tuple[SharedLimiter, SharedLimiter]) -> None:
    _, guest = pair
    quota = Quota(concurrency=1)
    answer = guest.reserve("acme", quota, 1)
    assert isinstance(answer, asyncio.Future)
    answer.cancel()
    await until_heard(guest)  # and has therefore given it back
    await granted(guest.reserve("acme", quota, 1))


async def test_what_a_lost_guest_held_comes_back_at_once_but_for_what_it_reported(
    pair: tuple[SharedLimiter, SharedLimiter],
) -> None:
    host, guest = pair
    quota = Quota(tokens=Rate(60), concurrency=1)
    held = await granted(guest.reserve("acme", quota, 60))
    guest.progress(held, 4)
    await until_heard(guest)
    await guest.close()
    answers = await eventually_async(
        lambda: host.reserve("acme", quota, 56, caller=NOBODY), lambda answer: not isinstance(answer, Refusal)
    )
    host.settle(await granted(answers), 56)
    assert (await refused(host.reserve("acme", quota, 1))).reason is Reason.TOKENS


async def test_a_guest_takes_over_keeps_what_it_holds_and_goes_on_counting(
    pair: tuple[SharedLimiter, SharedLimiter], clock: SteppedClock
) -> None:
    host, guest = pair
    quota = Quota(tokens=Rate(600), concurrency=3)
    await granted(host.reserve("acme", quota, 500))
    held = await granted(guest.reserve("acme", quota, 50))
    await host.close()
    await eventually_async(lambda: guest.is_host)
    full = await refused(guest.reserve("acme", quota, 51, caller=NOBODY))
    assert (full.reason, full.used) == (Reason.TOKENS, 550)
    await refused(guest.reserve("acme", Quota(concurrency=1), 1))
    guest.settle(held, 1)
    await granted(guest.reserve("acme", quota, 50, caller=5))
    clock.advance(60)
    await granted(guest.reserve("acme", quota, 600, caller=6))


async def test_a_gateway_that_is_started_again_goes_on_counting(tmp_path: Path, clock: SteppedClock) -> None:
    quota = Quota(Rate(3))
    for num_left in (3, 1):
        only = SharedLimiter(tmp_path, clock=clock)
        await only.start()
        for _ in range(2):
            answer = await answered(only.reserve("acme", quota, 1, caller=NOBODY))
            assert isinstance(answer, Refusal) == (num_left <= 0)
            num_left -= 1
        await only.close()


async def test_who_asks_while_nobody_serves_is_answered_after_a_while(
    pair: tuple[SharedLimiter, SharedLimiter], clock: SteppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, guest = pair
    monkeypatch.setattr(guest, "_send", lambda ask: None)  # as if the host hung
    answer = guest.reserve("acme", Quota(), 1)
    assert isinstance(answer, asyncio.Future)
    clock.advance(PATIENCE_S - 0.1)
    guest._give_up(older_than=clock() - PATIENCE_S)
    assert not answer.done()
    clock.advance(0.2)
    assert (await refused(answer)).reason is Reason.UNAVAILABLE


def test_a_host_that_dies_is_followed_in_the_time_that_is_promised() -> None:
    """A guest tries the lock every `RETRY_S`; who asks meanwhile waits for that, and a lease outlasts several beats."""
    assert RETRY_S <= 0.1
    assert PATIENCE_S >= 10 * RETRY_S
    assert LEASE_S >= 3 * BEAT_S


@pytest.mark.slow
def test_four_processes_never_get_more_than_the_limit_though_two_of_them_are_killed(tmp_path: Path) -> None:
    """First one that asks the host, and what it held comes back; then the host, and another goes on counting."""
    with Crowd(tmp_path, "shared", str(tmp_path)) as crowd:
        crowd.until_full()
        host = crowd.host()
        victim = next(process for process in crowd.processes if process is not host)
        victim.kill()
        crowd.until_refused_since(monotonic())
        host.kill()
        crowd.until_refused_since(monotonic())
        crowd.stop()
    assert 0.9 * LIMIT <= crowd.fullest() <= LIMIT
