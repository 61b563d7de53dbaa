"""One contract for every limiter: in one process, as the host of others, as their guest, and in Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.tenancy.limits.limiter import Limiter, LocalLimiter
from penstock.tenancy.limits.quota import NOBODY, Quota, Rate, Reason
from penstock.tenancy.limits.redis import RECOVER_S, RedisLimiter
from penstock.tenancy.limits.shared import SharedLimiter
from tests.tenancy.limits.answers import granted, refused
from tests.tenancy.limits.valkey import ValkeyProcess
from tests.virtual_time import SteppedClock
from tests.waiting import GIVE_UP_S


class Pair(NamedTuple):
    """Two gateways that count together; of one process, the same one twice."""

    one: Limiter
    other: Limiter
    clock: SteppedClock


@pytest.fixture(params=["local", "shared", "redis"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path, valkey: ValkeyProcess) -> AsyncIterator[Pair]:
    clock = SteppedClock()
    if request.param == "local":
        only = LocalLimiter(clock)
        yield Pair(only, only, clock)
        return

    def limiter() -> SharedLimiter | RedisLimiter:
        if request.param == "shared":
            return SharedLimiter(tmp_path, clock=clock)
        return RedisLimiter(valkey.url, on_loss="closed", prefix=tmp_path.name, clock=clock, timeout_s=GIVE_UP_S)

    one, other = limiter(), limiter()
    await one.start()
    await other.start()
    clock.advance(RECOVER_S)
    yield Pair(one, other, clock)
    await other.close()
    await one.close()


async def heard(limiter: Limiter) -> None:
    """Until all that this one was told has been done: answers come in order."""
    await granted(limiter.reserve("somebody else", Quota(concurrency=1000), 0))


async def test_the_whole_limit_may_come_at_once_and_no_minute_holds_more(pair: Pair) -> None:
    one, other, clock = pair
    quota = Quota(requests=Rate(6))
    for limiter in (one, other) * 3:
        await granted(limiter.reserve("acme", quota, 100))
    for seconds in (0.0, 30.0, 29.9):
        clock.advance(seconds)
        full = await refused(other.reserve("acme", quota, 1, caller=NOBODY))
        assert (full.reason, full.limit, full.used) == (Reason.REQUESTS, 6, 6)
    clock.advance(0.1)
    for limiter in (one, other) * 3:
        await granted(limiter.reserve("acme", quota, 100))


async def test_tokens_that_were_not_used_come_back_where_they_were_reserved(pair: Pair) -> None:
    one, other, clock = pair
    quota = Quota(tokens=Rate(100))
    held = await granted(one.reserve("acme", quota, 90))
    clock.advance(20)
    one.settle(held, 30)
    await heard(one)
    other.settle(await granted(other.reserve("acme", quota, 70)), 70)
    await heard(other)
    clock.advance(40)
    assert (await refused(other.reserve("acme", quota, 31, caller=NOBODY))).used == 70
    await granted(one.reserve("acme", quota, 30))


async def test_what_never_ran_costs_nothing(pair: Pair) -> None:
    one, other, _ = pair
    quota = Quota(Rate(1), Rate(10), 1)
    one.release(await granted(one.reserve("acme", quota, 10)))
    await heard(one)
    await granted(other.reserve("acme", quota, 10))


async def test_a_retry_is_told_the_same_time_and_is_let_in_then(pair: Pair) -> None:
    one, other, clock = pair
    quota = Quota(requests=Rate(3))
    for _ in range(3):
        await granted(one.reserve("acme", quota, 1))
    for waited in (0, 10, 25):
        clock.advance(waited)
        again = await refused(other.reserve("acme", quota, 1, caller=7))
        assert again.retry_after_s is not None
        left = again.retry_after_s
    assert left == 26.0  # a slot begins with its first admission, and may have had another a tenth of a second later
    clock.advance(left)
    await granted(one.reserve("acme", quota, 1, caller=7))


async def test_a_request_above_the_limit_is_never_possible(pair: Pair) -> None:
    answer = await refused(pair.other.reserve("acme", Quota(tokens=Rate(600)), 601, caller=1))
    assert (answer.reason, answer.limit, answer.retry_after_s) == (Reason.TOO_LARGE, 600, None)


async def test_a_smooth_rate_gives_the_limit_out_over_the_minute(pair: Pair) -> None:
    one, other, clock = pair
    quota = Quota(requests=Rate(60, smooth=True))
    for limiter in (one, other) * 5:
        await granted(limiter.reserve("acme", quota, 1))
    paced = await refused(other.reserve("acme", quota, 1, caller=NOBODY))
    assert (paced.reason, paced.is_paced, paced.used) == (Reason.REQUESTS, True, 10)
    clock.advance(1)
    await granted(one.reserve("acme", quota, 1))


async def test_limits_may_change_at_any_time(pair: Pair) -> None:
    one, other, _ = pair
    await granted(one.reserve("acme", Quota(requests=Rate(1)), 1))
    await refused(other.reserve("acme", Quota(requests=Rate(1)), 1))
    await granted(other.reserve("acme", Quota(requests=Rate(2)), 1))
    assert (await refused(one.reserve("acme", Quota(Rate(5), Rate(1)), 1))).reason is Reason.TOKENS
