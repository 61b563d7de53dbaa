"""Limits in a real Valkey: the script keeps the same books as Python, and survives what happens to servers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic

import pytest
from redis import Redis

from penstock.observe import background
from penstock.tenancy.limits.quota import NOBODY, US, Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.redis import BEAT_S, LEASE_S, RECOVER_S, SCRIPT, RedisLimiter, common_prefix, keys, limits
from penstock.tenancy.limits.tenant_limits import Reservation, TenantLimits
from tests.tenancy.limits.answers import answered, granted, refused
from tests.tenancy.limits.crowd import LIMIT, Crowd
from tests.tenancy.limits.valkey import ValkeyProcess
from tests.virtual_time import SteppedClock
from tests.waiting import GIVE_UP_S, eventually_async


@contextlib.asynccontextmanager
async def limiter(url: str, prefix: str, clock: SteppedClock, on_loss: str = "closed") -> AsyncIterator[RedisLimiter]:
    choice = "open" if on_loss == "open" else "closed"
    found = RedisLimiter(url, on_loss=choice, prefix=prefix, clock=clock, timeout_s=GIVE_UP_S)
    await found.start()
    clock.advance(RECOVER_S)  # an unknown past
    try:
        yield found
    finally:
        await found.close()


async def until_heard(one: RedisLimiter) -> None:
    """Until Valkey has done all that this limiter has asked of it: it answers in order."""
    await granted(one.reserve("somebody else", Quota(), 0))


@pytest.mark.parametrize("seed", range(10))
def test_the_script_and_the_account_give_the_same_answers(valkey: ValkeyProcess, seed: int) -> None:
    rng = random.Random(seed)
    quota = Quota(
        rng.choice([None, Rate(rng.randint(1, 300), rng.random() < 0.5)]),
        rng.choice([None, Rate(rng.randint(60, 30_000), rng.random() < 0.5)]) if seed else Rate(1000),
        rng.choice([None, rng.randint(1, 20)]),
    )
    redis = Redis.from_url(valkey.url)
    run = redis.register_script(SCRIPT)
    names = keys(f"same{seed}", "acme")
    now = 1_700_000_000 * US
    redis.hset(names[-1], mapping={"since": "1", "trusted": "1"})
    redis.hset(names[-2], "me", str(2 * now))
    account = TenantLimits(quota, now)
    open_ones: list[tuple[str, Reservation]] = []
    for step in range(600):
        now += rng.choice([0, 0, 0, 1, rng.randint(0, US // 10), rng.randint(0, 3 * US), rng.randint(0, 20) * US])
        if open_ones and rng.random() < 0.4:
            id, held = open_ones.pop(rng.randrange(len(open_ones)))
            used = rng.randint(0, held.tokens)
            if rng.random() < 0.8:
                account.settle(held, used, now)
                run(names, ["settle", now, id, used])
            else:
                account.release(held, now)
                run(names, ["release", now, id])
            continue
        per_minute = 1000 if quota.tokens is None else quota.tokens.per_minute
        tokens = rng.choice([rng.randint(0, per_minute // 50), rng.randint(0, per_minute + 5)])
        caller = rng.randint(NOBODY, 3)
        mine = account.reserve(tokens, caller, now)
        arguments = [*limits(quota), US, tokens, caller]
        theirs = run(names, ["reserve", now, f"id{step}", "me", *arguments])
        if isinstance(mine, Reservation):
            assert mine.slot is not None
            assert theirs == [1, b"%d" % mine.slot.start, b"%d" % now]
            open_ones.append((f"id{step}", mine))
        else:
            wait = 0 if mine.retry_after_s is None else round(mine.retry_after_s * US)
            expected = [wait, int(mine.is_due), mine.limit, mine.used, mine.kept, int(mine.is_paced)]
            assert theirs == [0, mine.reason.encode(), *expected]


async def test_two_limiters_draw_on_the_same_limits(valkey: ValkeyProcess) -> None:
    quota, clock = Quota(Rate(600), concurrency=2), SteppedClock()
    async with limiter(valkey.url, "two", clock) as one, limiter(valkey.url, "two", clock) as other:
        held = await granted(one.reserve("acme", quota, 5))
        await granted(other.reserve("acme", quota, 5))
        assert (await refused(one.reserve("acme", quota, 5))).reason is Reason.CONCURRENCY
        one.settle(held, 5)
        await until_heard(one)
        await granted(other.reserve("acme", quota, 5, caller=2))


async def test_the_servers_own_clock_is_used_where_no_other_is_given(valkey: ValkeyProcess) -> None:
    one = RedisLimiter(valkey.url, on_loss="closed", prefix="own clock", timeout_s=GIVE_UP_S)
    await one.start()
    try:
        await granted(one.reserve("acme", Quota(concurrency=1), 1))
        (at, _), redis = Redis.from_url(valkey.url).time(), Redis.from_url(valkey.url)
        (lease_ends,) = redis.hvals(keys(common_prefix("own clock"), "")[-2])
        assert at - 60 < int(lease_ends) / US - LEASE_S < at + 60
    finally:
        await one.close()


async def test_what_is_cancelled_while_it_waits_is_given_back(valkey: ValkeyProcess) -> None:
    quota = Quota(concurrency=1)
    async with limiter(valkey.url, "cancelled", SteppedClock()) as one:
        answer = one.reserve("acme", quota, 1)
        assert isinstance(answer, asyncio.Future)
        answer.cancel()
        await until_heard(one)  # and has therefore given it back, with what goes out next
        await granted(one.reserve("acme", quota, 1))


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["open", "closed"])
async def test_without_redis_the_choice_applies_and_it_recovers_by_itself(tmp_path: Path, on_loss: str) -> None:
    server, clock = ValkeyProcess(tmp_path), SteppedClock()
    quota = Quota(tokens=Rate(60_000), concurrency=2)
    try:
        async with limiter(server.url, "loss", clock, on_loss) as one:
            held = await granted(one.reserve("acme", quota, 10))
            server.kill()
            answer = await answered(one.reserve("acme", quota, 10))
            assert isinstance(answer, Refusal) == (on_loss == "closed")
            assert not isinstance(answer, Refusal) or answer.reason is Reason.UNAVAILABLE
            server.start()
            await eventually_async(lambda: one.is_connected)
            if on_loss == "closed":
                wait = await refused(one.reserve("acme", quota, 10, caller=NOBODY))
                assert (wait.reason, wait.retry_after_s) == (Reason.UNAVAILABLE, RECOVER_S), "others may know more"
                clock.advance(RECOVER_S)
            too_much = await refused(one.reserve("acme", quota, 60_000, caller=NOBODY))
            assert (too_much.reason, too_much.used) == (Reason.TOKENS, 10), "what was granted before is known again"
            await granted(one.reserve("acme", quota, 10, caller=1))
            full = await refused(one.reserve("acme", quota, 10, caller=2))
            assert full.reason is Reason.CONCURRENCY, "what was open before is known again"
            one.settle(held, 10)
            await granted(one.reserve("acme", quota, 10, caller=3))
    finally:
        server.kill()


@pytest.mark.slow
async def test_a_process_that_did_not_notice_a_restart_does_not_undo_the_recovery(tmp_path: Path) -> None:
    """Its client connects again by itself, and the script is there already: another process has loaded it."""
    server, clock, quota = ValkeyProcess(tmp_path), SteppedClock(), Quota(tokens=Rate(100))
    try:
        async with limiter(server.url, "idle", clock) as idle:
            await granted(idle.reserve("acme", quota, 60))
            server.kill()
            server.start()
            async with limiter(server.url, "idle", clock) as other:
                for _ in range(4):
                    for each in (other, idle):
                        each._call(each._heartbeat())
                        await until_heard(each)
                        await until_heard(each)  # what a heartbeat's answer makes it tell
                    clock.advance(BEAT_S)
                assert idle.is_connected
                assert (await refused(other.reserve("acme", quota, 41, caller=NOBODY))).used == 60
                await granted(other.reserve("acme", quota, 40))
    finally:
        server.kill()


async def test_a_dead_process_loses_what_it_held_when_its_lease_ends(valkey: ValkeyProcess) -> None:
    assert LEASE_S <= 10
    quota, clock = Quota(concurrency=1), SteppedClock()
    async with limiter(valkey.url, "lease", clock) as one:
        async with limiter(valkey.url, "lease", clock) as dead:
            await granted(dead.reserve("acme", quota, 1))
        clock.advance(LEASE_S - RECOVER_S - 1)
        await refused(one.reserve("acme", quota, 1, caller=NOBODY))
        clock.advance(1)
        await granted(one.reserve("acme", quota, 1, caller=NOBODY))


@pytest.mark.slow
def test_processes_never_get_more_than_the_limit_though_valkey_is_killed(tmp_path: Path) -> None:
    """It comes back empty; the processes tell it what they were granted."""
    server = ValkeyProcess(tmp_path)
    with Crowd(tmp_path, "redis", server.url, processes=2, clients=32) as crowd:
        try:
            crowd.until_full()
            server.kill()
            killed_at = monotonic()
            server.start()
            crowd.until_refused_since(killed_at)
            crowd.stop()
        finally:
            server.kill()
    assert 0.9 * LIMIT <= crowd.fullest() <= LIMIT


@pytest.mark.parametrize("on_loss", ["open", "closed"])
async def test_an_error_at_one_tenants_account_is_that_tenants_own(valkey: ValkeyProcess, on_loss: str) -> None:
    prefix, quota = f"spoilt {on_loss}", Quota(tokens=Rate(60_000), concurrency=2)
    redis, clock = Redis.from_url(valkey.url), SteppedClock()
    async with limiter(valkey.url, prefix, clock, on_loss) as one:
        redis.rpush(keys(common_prefix(prefix), "acme")[0], "no account")
        before = background.errors().get("limiter", 0)
        for _ in range(3):
            bad, good = one.reserve("acme", quota, 1), one.reserve("other", Quota(), 1)  # in one batch
            assert (await refused(bad)).reason is Reason.ACCOUNT_ERROR  # never let in without limits
            await granted(good)
            assert one.is_connected
        assert background.errors()["limiter"] - before == 3
        redis.delete(keys(common_prefix(prefix), "acme")[0])
        await granted(one.reserve("acme", quota, 1))


async def test_a_redis_that_was_emptied_is_told_what_was_granted(valkey: ValkeyProcess) -> None:
    quota, clock, redis = Quota(tokens=Rate(100)), SteppedClock(), Redis.from_url(valkey.url)
    async with limiter(valkey.url, "emptied", clock) as one, limiter(valkey.url, "emptied", clock) as other:
        held = await granted(one.reserve("acme", quota, 50))
        other.settle(await granted(other.reserve("acme", quota, 50)), 50)
        redis.delete(*redis.keys("{emptied}:*"))
        unknown = await refused(one.reserve("acme", quota, 1, caller=NOBODY))
        assert unknown.reason is Reason.UNAVAILABLE
        for each in (one, other):
            each._call(each._heartbeat())
            await until_heard(each)
            await until_heard(each)
        clock.advance(RECOVER_S)
        assert (await refused(one.reserve("acme", quota, 21, caller=NOBODY))).used == 100
        one.settle(held, 30)
        await granted(one.reserve("acme", quota, 20, caller=NOBODY))


async def test_an_error_that_the_server_gives_everybody_is_a_loss_that_is_recovered_from(valkey: ValkeyProcess) -> None:
    async with limiter(valkey.url, "flushed", SteppedClock()) as one:
        held = await granted(one.reserve("acme", Quota(concurrency=1), 1))
        Redis.from_url(valkey.url).script_flush()
        assert (await refused(one.reserve("acme", Quota(concurrency=2), 1))).reason is Reason.UNAVAILABLE
        await eventually_async(lambda: one.is_connected)
        one.settle(held, 1)
        await granted(one.reserve("acme", Quota(concurrency=1), 1))
