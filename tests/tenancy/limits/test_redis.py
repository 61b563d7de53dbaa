"""Limits in a real Valkey: the script keeps the same books as Python, and survives what happens to servers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from redis import Redis

from penstock.tenancy.limits.account import Account, Reservation
from penstock.tenancy.limits.limiter import Answer, Held
from penstock.tenancy.limits.quota import NOBODY, US, Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.redis import SCRIPT, RedisLimiter, keys, limits
from tests.gateway.http.scripted import until
from tests.tenancy.limits.crowd import Crowd
from tests.tenancy.limits.valkey import ValkeyProcess


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@contextlib.asynccontextmanager
async def limiter(url: str, prefix: str, on_loss: str = "closed") -> AsyncIterator[RedisLimiter]:
    found = RedisLimiter(url, on_loss="open" if on_loss == "open" else "closed", prefix=prefix)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


async def answered(answer: Answer | asyncio.Future[Answer]) -> Answer:
    return await answer if isinstance(answer, asyncio.Future) else answer


async def granted(answer: Answer | asyncio.Future[Answer]) -> Held:
    found = await answered(answer)
    assert not isinstance(found, Refusal)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_script_and_the_account_give_the_same_answers(valkey: ValkeyProcess, seed: int) -> None:
    rng = random.Random(seed)
    quota = Quota(
        rng.choice([None, Rate(rng.randint(1, 300))]),
        rng.choice([None, Rate(rng.randint(60, 30_000), rng.choice([2.0, 10.0]))]) if seed else Rate(1000),
        rng.choice([None, rng.randint(1, 20)]),
    )
    redis = Redis.from_url(valkey.url)
    run = redis.register_script(SCRIPT)
    names = keys(f"same{seed}", "acme")
    now = 1_700_000_000 * US
    redis.hset(names[-1], "since", "1")
    redis.hset(names[-2], "me", str(2 * now))
    account = Account(quota, now)
    open_ones: list[tuple[str, Reservation]] = []
    for step in range(600):
        now += rng.choice([0, 0, 1, rng.randint(0, US // 10), rng.randint(0, 3 * US), rng.randint(0, 20) * US])
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
            assert theirs == [1]
            open_ones.append((f"id{step}", mine))
        else:
            wait = 0 if mine.retry_after_s is None else round(mine.retry_after_s * US)
            assert theirs == [0, mine.reason.encode(), wait, int(mine.is_due)]


async def test_two_limiters_draw_on_the_same_limits(valkey: ValkeyProcess) -> None:
    quota = Quota(Rate(600), concurrency=2)
    async with limiter(valkey.url, "two") as one, limiter(valkey.url, "two") as other:
        await asyncio.sleep(0.3)  # an unknown past: the buckets start empty
        held = await granted(one.reserve("acme", quota, 5))
        await granted(other.reserve("acme", quota, 5))
        refused = await answered(one.reserve("acme", quota, 5))
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.CONCURRENCY
        one.settle(held, 5)
        await granted(other.reserve("acme", quota, 5, caller=2))


async def test_what_is_cancelled_while_it_waits_is_given_back(valkey: ValkeyProcess) -> None:
    async with limiter(valkey.url, "cancelled") as one:
        answer = one.reserve("acme", Quota(concurrency=1), 1)
        assert isinstance(answer, asyncio.Future)
        answer.cancel()
        await asyncio.sleep(0.05)
        await granted(one.reserve("acme", Quota(concurrency=1), 1))


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["open", "closed"])
async def test_without_redis_the_choice_applies_and_it_recovers_by_itself(tmp_path: Path, on_loss: str) -> None:
    server = ValkeyProcess(tmp_path)
    quota = Quota(tokens=Rate(60_000), concurrency=2)
    try:
        async with limiter(server.url, "loss", on_loss) as one:
            await asyncio.sleep(0.2)
            held = await granted(one.reserve("acme", quota, 10))
            server.kill()
            answer = await answered(one.reserve("acme", quota, 10))
            assert isinstance(answer, Refusal) == (on_loss == "closed")
            assert not isinstance(answer, Refusal) or answer.reason is Reason.UNAVAILABLE
            server.start()
            await until(lambda: one.is_connected, 10.0)
            await asyncio.sleep(1.5)  # the buckets start empty
            await granted(one.reserve("acme", quota, 10, caller=1))
            full = await answered(one.reserve("acme", quota, 10, caller=2))
            assert isinstance(full, Refusal), "what was open before is known again"
            assert full.reason is Reason.CONCURRENCY
            one.settle(held, 10)
            await granted(one.reserve("acme", quota, 10, caller=3))
    finally:
        server.kill()


@pytest.mark.slow
async def test_a_dead_process_loses_its_lease_within_ten_seconds(valkey: ValkeyProcess) -> None:
    quota = Quota(concurrency=1)
    async with limiter(valkey.url, "lease") as one:
        async with limiter(valkey.url, "lease") as dead:
            await granted(dead.reserve("acme", quota, 1))
        began = monotonic()
        while isinstance(answer := await answered(one.reserve("acme", quota, 1, caller=1)), Refusal):
            assert monotonic() - began < 10
            await asyncio.sleep(0.25)
        assert not isinstance(answer, Refusal)


@pytest.mark.slow
def test_four_processes_get_the_rate_and_never_more_though_valkey_is_killed(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path)
    crowd = Crowd(tmp_path, "redis", server.url, seconds=9)
    try:
        sleep(5.5)
        killed_at = monotonic()
        server.kill()
        sleep(0.5)
        server.start()
        crowd.wait()
    finally:
        crowd.stop()
        server.kill()
    assert crowd.excess() <= 0
    assert crowd.share_used(crowd.busy()[0], killed_at) >= 0.95
    assert crowd.count("refused") > 100
    assert any(admission.asked > killed_at + 0.6 for admission in crowd.admissions())
