from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from penstock.bench.board import Board
from penstock.bench.client import Client
from penstock.bench.lag import TICK_S, doubts
from penstock.bench.load import Load, Run
from penstock.bench.speech import Speech
from penstock.http.limits import UpstreamLimits
from penstock.http.upstream import Upstream
from penstock.workload.conversations import Conversation, Message, Turn
from tests.bench.fake_server import FakeServer, MemoryClient, serving
from tests.virtual_time import VirtualTimeLoop, in_virtual_time
from tests.waiting import GIVE_UP_S


class Asking:
    """So many words, over and over; making the conversation `slow_number` takes a while."""

    count = None

    def __init__(self, num_turns: int = 1, output_tokens: int = 3, slow_number: int = -1, think_s: float = 0.0) -> None:
        self.num_turns = num_turns
        self.output_tokens = output_tokens
        self.slow_number = slow_number
        self.think_s = think_s

    def at_s(self, number: int) -> None:
        return None

    def conversation(self, number: int) -> Conversation:
        if number == self.slow_number:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.clock.advance(0.3)
        said: list[Message] = [{"role": "user", "content": f"question {number}"}]
        return Conversation(
            tuple(Turn((*said,), self.output_tokens, self.think_s) for _ in range(self.num_turns)), "me"
        )


def every(interval_s: float) -> Iterator[float]:
    return (number * interval_s for number in count())


async def run_open(
    fake: FakeServer, source: Asking, interval_s: float, total: int, *, silence_s: float | None = None, **options: float
) -> Run:
    """With a bound for silence over a real connection, else in memory."""
    client = MemoryClient(fake) if silence_s is None else Client(fake.url, timeout_s=GIVE_UP_S)
    if silence_s is not None:
        client._upstream = Upstream.from_url(fake.url, limits=UpstreamLimits(silence_timeout_s=silence_s))
    try:
        load = Load(client, Speech("fake"), Board())
        return await load.open(source, every(interval_s), total=total, **options)
    finally:
        client.close()


@in_virtual_time
async def test_requests_leave_at_their_times_though_the_server_answers_none_of_them() -> None:
    fake = FakeServer(token_s=0.2, slots=1)
    run = await run_open(fake, Asking(output_tokens=1), 0.02, total=8)
    results = sorted(run.results, key=lambda one: one.number)
    assert [one.intended_s for one in results] == pytest.approx([0.02 * number for number in range(8)])
    assert [one.sent_s for one in results] == pytest.approx([0.02 * number for number in range(8)])
    assert fake.most_running == 8
    # Each has waited for all before it.
    assert [one.ttft_s for one in results] == pytest.approx([0.2 * (n + 1) - 0.02 * n for n in range(8)])


@in_virtual_time
async def test_what_the_generator_holds_up_counts_as_latency_and_is_confessed() -> None:
    """Coordinated omission: requests 3 and on leave late because the generator was busy; their users waited."""
    run = await run_open(FakeServer(token_s=0.01), Asking(slow_number=3), 0.05, total=8)
    late = next(one for one in run.results if one.number == 4)
    assert late.intended_s == pytest.approx(0.2)
    assert late.sent_s == pytest.approx(0.4)  # the third was made from 0.1 on
    assert late.ttft_from_send_s == pytest.approx(0.01)
    assert late.ttft_s == pytest.approx(0.2 + 0.01)
    assert run.health.send_delay is not None
    assert run.health.send_delay.most == pytest.approx(0.3)  # of the second, which was to leave when that began
    assert run.health.lag is not None
    assert 0.3 - 2 * TICK_S < run.health.lag.most <= 0.3
    assert any("after their time" in doubt for doubt in doubts(run.health, ttft=None, tpot=None))


@in_virtual_time
async def test_each_turn_carries_the_real_answers_before_it_after_a_pause_for_thought() -> None:
    fake = FakeServer()
    run = await run_open(fake, Asking(num_turns=3, think_s=0.05), 0.01, total=1)
    question = {"role": "user", "content": "question 0"}
    answer = {"role": "assistant", "content": " word word word"}
    assert [body["messages"] for body in fake.bodies] == [
        [question],
        [question, answer, question],
        [question, answer, question, answer, question],
    ]
    assert {body["user"] for body in fake.bodies} == {"me"}
    first, second, _ = sorted(run.results, key=lambda one: one.turn)
    assert second.intended_s == pytest.approx(first.ended_s + 0.05)


@pytest.mark.parametrize(
    ("misdeed", "kind"), [("cut", "cut_off"), ("error", "stream_error"), ("stall", "silence"), ("no_usage", None)]
)
async def test_what_a_server_does_wrong_is_counted_by_its_kind(misdeed: str, kind: str | None) -> None:
    async with serving(FakeServer(misdeed=misdeed)) as fake:
        run = await run_open(fake, Asking(), 0.01, total=2, silence_s=0.05 if misdeed == "stall" else GIVE_UP_S)
    assert [one.error for one in run.results] == [kind] * 2
    assert all(one.output_tokens == 3 for one in run.results if one.error is None)


async def test_a_server_that_refuses_with_429_is_not_asked_again() -> None:
    async with serving(FakeServer(refuse_every=2, status=429)) as fake:
        run = await run_open(fake, Asking(num_turns=3), 0.01, total=3, silence_s=GIVE_UP_S)
    assert sum(one.error == "http_429" for one in run.results) >= 1
    assert len(run.results) == len(fake.bodies) < 9


@in_virtual_time
async def test_who_still_runs_after_the_drain_is_given_up() -> None:
    run = await run_open(FakeServer(token_s=0.05), Asking(output_tokens=1000), 0.01, total=3, drain_s=0.1)
    assert [one.error for one in run.results] == ["abandoned"] * 3
    assert run.wall_s == pytest.approx(0.02 + 0.1)


@in_virtual_time
async def test_an_interrupted_load_tells_what_it_had() -> None:
    task = asyncio.ensure_future(run_open(FakeServer(token_s=0.01), Asking(), 0.05, total=1000))
    await asyncio.sleep(1.01)  # the twenty-first has just been asked
    task.cancel()
    run = await task
    assert run.was_interrupted
    assert [one.error for one in run.results] == [None] * 20 + ["abandoned"]
