"""One limiter for the processes of a host, with real processes: shared exactly, and handed on when its process dies."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from penstock.tenancy.limits.limiter import Answer, Held
from penstock.tenancy.limits.quota import Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.shared import SharedLimiter
from tests.gateway.http.scripted import until
from tests.tenancy.limits.crowd import Crowd


async def answered(answer: Answer | asyncio.Future[Answer]) -> Answer:
    return await answer if isinstance(answer, asyncio.Future) else answer


async def granted(answer: Answer | asyncio.Future[Answer]) -> Held:
    found = await answered(answer)
    assert not isinstance(found, Refusal)
    return found


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[SharedLimiter, SharedLimiter]]:
    host, guest = SharedLimiter(tmp_path), SharedLimiter(tmp_path)
    await host.start()
    await guest.start()
    yield host, guest
    await guest.close()
    await host.close()


async def test_host_and_guest_draw_on_the_same_limits(pair: tuple[SharedLimiter, SharedLimiter]) -> None:
    host, guest = pair
    assert host.is_host
    assert not guest.is_host
    quota = Quota(tokens=Rate(60), concurrency=3)
    held = await granted(guest.reserve("acme", quota, 10))
    assert isinstance(await answered(host.reserve("acme", quota, 4)), Refusal)
    guest.settle(held, 1)
    guest.settle(held, 0)
    await asyncio.sleep(0.05)
    await granted(host.reserve("acme", quota, 5))  # behind the place kept for the 4


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
    await asyncio.sleep(0.05)
    await granted(guest.reserve("acme", quota, 1))


async def test_what_a_lost_guest_held_comes_back_at_once_but_for_what_it_reported(
    pair: tuple[SharedLimiter, SharedLimiter],
) -> None:
    host, guest = pair
    quota = Quota(tokens=Rate(60), concurrency=1)
    held = await granted(guest.reserve("acme", quota, 10))
    guest.progress(held, 4)
    await asyncio.sleep(0.05)
    await guest.close()
    await asyncio.sleep(0.05)
    host.settle(await granted(host.reserve("acme", quota, 6)), 6)
    refused = await answered(host.reserve("acme", quota, 1))
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.TOKENS


async def test_a_guest_takes_over_keeps_what_it_holds_and_starts_with_empty_buckets(
    pair: tuple[SharedLimiter, SharedLimiter],
) -> None:
    host, guest = pair
    quota = Quota(tokens=Rate(600), concurrency=2)
    held = await granted(guest.reserve("acme", quota, 1))
    await host.close()
    await until(lambda: guest.is_host)
    refused = await answered(guest.reserve("acme", quota, 50))
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.TOKENS
    only_slots = Quota(concurrency=1)
    assert isinstance(await answered(guest.reserve("acme", only_slots, 1)), Refusal)
    guest.settle(held, 1)
    await granted(guest.reserve("acme", only_slots, 1, caller=5))


@pytest.mark.slow
def test_four_processes_with_64_clients_get_the_rate_and_never_more(tmp_path: Path) -> None:
    """One of them is killed in the middle, and what it held comes back."""
    crowd = Crowd(tmp_path, "shared", str(tmp_path), seconds=9)
    try:
        sleep(5)
        victim = next(process for process in crowd.processes if process is not crowd.host())
        victim.kill()
        crowd.wait()
    finally:
        crowd.stop()
    assert crowd.excess() <= 0
    assert crowd.share_used(*crowd.busy()) >= 0.95
    assert crowd.broken_promises() == 0
    assert crowd.count("refused") > 100


@pytest.mark.slow
def test_killing_the_process_that_serves_the_limiter_breaks_no_window(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, "shared", str(tmp_path), seconds=16)
    try:
        sleep(5)
        crowd.host().kill()
        killed_at = monotonic()
        crowd.wait()
    finally:
        crowd.stop()
    assert crowd.excess() <= 0
    after = [admission.answered for admission in crowd.admissions() if admission.answered > killed_at + 0.01]
    assert min(after) < killed_at + 2
    assert crowd.share_used(killed_at + 2, crowd.busy()[1]) >= 0.95
