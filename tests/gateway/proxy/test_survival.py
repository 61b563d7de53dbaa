"""Streams that lose their replica: all at once, again and again, and with breakers open."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from math import inf
from typing import Any

import pytest
from tools.drills.call import Call, begin, post

from penstock.admission.expected import Expected
from penstock.core.replica import ReplicaState
from penstock.gateway.proxy.stranded import WAIT_S
from tests.engine.expecting import expected as expected_ids
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, engines_paused, serving
from tests.waiting import GIVE_UP_S, eventually, eventually_async

ROOMY = {"num_blocks": 8192, "max_num_seqs": 128, "chunk_tokens": 512}


def asked(number: int, tokens: int, key: str = "none") -> bytes:
    body: dict[str, Any] = {"model": NAME, "prompt": f"stream {number}", "max_tokens": tokens, "temperature": 0}
    return post("/v1/completions", body | {"stream": True, "ignore_eos": True}, key)


def said(replica: Replica, number: int, tokens: int) -> str:
    """What the fake model says to it, undisturbed."""
    tokenizer = replica.model.tokenizer
    ids = expected_ids(replica.prompt_ids(f"stream {number}"), tokens, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode(ids)


async def streams(gateway: RunningGateway, replicas: list[Replica], count: int, tokens: int) -> list[Call]:
    """All have begun, and hardly: the engines stand still until every request is there."""
    with engines_paused(replicas):
        calls = [await begin(gateway.port, asked(number, tokens)) for number in range(count)]
        await eventually_async(lambda: sum(replica.engine.num_open for replica in replicas) == count)
    await asyncio.wait([call.at_event(5) for call in calls], return_when=asyncio.FIRST_COMPLETED)
    return calls


async def whole_texts(calls: list[Call]) -> list[str]:
    async with asyncio.timeout(GIVE_UP_S):
        await asyncio.gather(*(call.ended for call in calls))
    assert all(call.is_whole and call.body.endswith(b"data: [DONE]\n\n") for call in calls)
    assert all(len({event["id"] for event in call.events()}) == 1 for call in calls)
    return [call.text for call in calls]


def is_ready_for(gateway: RunningGateway, replica: Replica) -> bool:
    """The engine is back, and the gateway has heard of it."""
    seen = gateway.app.replicas[f"http://{replica.host}:{replica.port}"].snapshot
    return replica.engine.state == "ready" and seen.state is ReplicaState.READY


def busy(replicas: list[Replica]) -> Replica:
    return max(replicas, key=lambda replica: replica.engine.num_open)


@pytest.mark.slow
async def test_more_streams_than_may_be_retried_outlive_their_replica() -> None:
    with (
        serving(step_s=0.03, **ROOMY) as one,
        serving(step_s=0.03, **ROOMY) as two,
        running_gateway(one, two) as gateway,
    ):
        expected = [said(one, number, 100) for number in range(120)]
        calls = await streams(gateway, [one, two], 120, 100)
        hurt = busy([one, two])
        assert hurt.engine.num_open > 50
        hurt.kill_engine()
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


def asked_whole(number: int, tokens: int, **options: Any) -> bytes:
    body: dict[str, Any] = {"model": NAME, "prompt": f"stream {number}", "max_tokens": tokens, "ignore_eos": True}
    return post("/v1/completions", body | {"temperature": 0} | options, "none")


@pytest.mark.slow
@pytest.mark.parametrize("is_drained", [False, True], ids=["lost", "drained"])
async def test_an_answer_that_is_not_streamed_goes_on_at_another_replica_where_it_was(is_drained: bool) -> None:
    with (
        serving(step_s=0.01, **ROOMY) as one,
        serving(step_s=0.01, **ROOMY) as two,
        running_gateway(one, two) as gateway,
    ):
        calls = [await begin(gateway.port, asked_whole(number, 300, n=2)) for number in range(4)]
        await eventually_async(lambda: one.engine.num_open + two.engine.num_open == 8)
        await eventually_async(
            lambda: sum(replica.engine.measured.totals.generated_tokens for replica in (one, two)),
            lambda made: made > 8 * 60,
        )
        hurt = busy([one, two])
        if is_drained:
            await asyncio.to_thread(hurt.call, "POST", "/v1/penstock/drain")
            await eventually_async(lambda: hurt.engine.num_open == 0)
        else:
            hurt.kill_engine()
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(call.ended for call in calls))
        for number, call in enumerate(calls):
            assert call.status == 200
            assert call.headers["content-type"] == "application/json"
            assert [choice["text"] for choice in call.json()["choices"]] == [said(one, number, 300)] * 2
            assert call.usage["completion_tokens"] == 600
        assert 'penstock_gateway_streams_carried_on_total{model="small"} ' in gateway.metrics()
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_an_answer_with_log_probabilities_begins_anew_at_another_replica() -> None:
    with (
        serving(step_s=0.01, **ROOMY) as one,
        serving(step_s=0.01, **ROOMY) as two,
        running_gateway(one, two) as gateway,
    ):
        call = await begin(gateway.port, asked_whole(0, 100, logprobs=1))
        await eventually_async(lambda: one.engine.num_open + two.engine.num_open == 1)
        busy([one, two]).kill_engine()
        async with asyncio.timeout(GIVE_UP_S):
            await call.ended
        (choice,) = call.json()["choices"]
        assert choice["text"] == said(one, 0, 100)
        assert len(choice["logprobs"]["tokens"]) == 100


@pytest.mark.slow
async def test_streams_of_a_lost_replica_go_on_in_another_zone() -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(step_s=0.01, **ROOMY)) for _ in range(3)]
        gateway = stack.enter_context(running_gateway(*replicas))
        expected = [said(replicas[0], number, 300) for number in range(12)]
        calls = await streams(gateway, replicas, 12, 300)
        hurt = busy(replicas)
        near, far = (one for one in replicas if one is not hurt)
        for replica, zone in ((hurt, "east"), (near, "east"), (far, "west")):
            gateway.app.replicas[f"http://{replica.host}:{replica.port}"].zone = zone
        before, num_lost = near.engine.num_open, hurt.engine.num_open
        assert num_lost > 0
        with engines_paused([near, far]):
            hurt.kill_engine()
            await eventually_async(lambda: near.engine.num_open + far.engine.num_open == 12)
            assert near.engine.num_open == before
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_a_stream_returns_to_a_replica_that_failed_it_before() -> None:
    with (
        serving(step_s=0.01, **ROOMY) as one,
        serving(step_s=0.01, **ROOMY) as two,
        running_gateway(one, two) as gateway,
    ):
        expected = [said(one, 0, 500)]
        calls = await streams(gateway, [one, two], 1, 500)
        for event in (40, 80, 120):
            hurt = busy([one, two])
            assert hurt.engine.num_open == 1
            hurt.kill_engine()
            await calls[0].at_event(event)
            with busy([one, two]).engine_paused():  # lest it ends before there is another one to go to
                await asyncio.to_thread(eventually, lambda hurt=hurt: is_ready_for(gateway, hurt))
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_a_stream_waits_for_the_only_replica_to_come_back() -> None:
    with serving(step_s=0.01, **ROOMY) as one, running_gateway(one) as gateway:
        expected = [said(one, 0, 100)]
        calls = await streams(gateway, [one], 1, 100)
        one.kill_engine()
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_a_stream_that_lost_two_replicas_waits_for_one_of_them_and_spares_the_third() -> None:
    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(step_s=0.01, **ROOMY)) for _ in range(3)]
        gateway = stack.enter_context(running_gateway(*replicas))
        expected = [said(replicas[0], 0, 400)]
        calls = await streams(gateway, replicas, 1, 400)
        lost = []
        for event in (40, 80):
            lost.append(busy(replicas))
            await asyncio.to_thread(gateway.set_in_use, lost[-1], False)
            lost[-1].kill_engine()
            if event == 40:
                await calls[0].at_event(event)
        (spared,) = [replica for replica in replicas if replica not in lost]
        await eventually_async(lambda: len(gateway.app.stranded) == 1)
        assert is_ready_for(gateway, spared)
        assert spared.engine.num_open == 0

        await asyncio.to_thread(eventually, lambda: lost[0].engine.state == "ready")
        await asyncio.to_thread(gateway.set_in_use, lost[0], True)
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_a_stream_waits_for_as_long_as_a_controller_lets_requests_wait() -> None:
    may_return = threading.Event()
    with serving(step_s=0.01, may_return=may_return, **ROOMY) as one, running_gateway(one) as gateway:
        expected = [said(one, 0, 100)]
        held = Expected(hold_s=10 * WAIT_S, ready_at=None, start_s=0.0, until=inf)
        gateway.app.admission.expect({NAME: held}, gateway.app.clock.now())
        calls = await streams(gateway, [one], 1, 100)
        one.kill_engine()
        await eventually_async(lambda: len(gateway.app.stranded) == 1)
        await asyncio.to_thread(gateway.advance, 2 * WAIT_S)
        assert len(gateway.app.stranded) == 1
        may_return.set()
        assert await whole_texts(calls) == expected
        eventually(gateway.is_idle)


@pytest.mark.slow
async def test_a_stream_ends_with_an_error_if_no_replica_comes_back_in_time() -> None:
    may_return = threading.Event()
    with serving(step_s=0.01, may_return=may_return, **ROOMY) as one, running_gateway(one) as gateway:
        key = gateway.add_tenant("t")
        (call,) = calls = [await begin(gateway.port, asked(0, 400, key))]
        await call.at_event(5)
        one.kill_engine()
        await eventually_async(lambda: len(gateway.app.stranded) == 1)
        await asyncio.to_thread(gateway.advance, WAIT_S)
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(call.ended for call in calls))
        assert "the replica failed in the middle of the answer" in call.events()[-1]["error"]["message"]
        await asyncio.to_thread(eventually, gateway.is_idle)
        assert sum(usage.output_tokens for usage in gateway.ledger.usages) >= 5  # the client has them
        may_return.set()
