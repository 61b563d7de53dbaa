"""The client with a real engine process at the other end, over the fake runner."""

import asyncio
import math
import signal
import socket

import pytest

from penstock.core.clock import MonotonicClock
from penstock.core.errors import EngineFailed, EngineUnavailable, ModelUnsupported, RequestAborted
from penstock.core.measurements import ServingLimits
from penstock.core.request import FinishReason, Request
from penstock.core.sampling import SamplingParams
from penstock.engine.client import EngineClient, EngineProcess, EngineState
from penstock.engine.mailbox import frame
from penstock.engine.messages import EngineInfo, Loading, Ready, StepReport, Submit
from tests.engine.expecting import engine, engine_process, expected, is_ready, read, tokens_of
from tests.engine.fake_engine import POISON, launcher
from tests.waiting import GIVE_UP_S, eventually_async

SLOW = 0.01  # seconds per step: time to act while a request runs


def endless(request_id: str, first: int = 1) -> Request:
    return Request(request_id, [first, 2, 3], max_tokens=1500)


# -- requests


async def test_tokens_arrive_in_order_and_are_the_models() -> None:
    async with engine() as client:
        requests = [Request(f"r{i}", [i, 2, 3], max_tokens=20 + i) for i in range(8)]
        outputs = await asyncio.gather(*(tokens_of(client, request) for request in requests))
        assert outputs == [expected([i, 2, 3], 20 + i) for i in range(8)]
        assert client.num_open == 0


@pytest.mark.parametrize("overlaps", [False, True])
async def test_a_burst_of_a_thousand_requests_is_answered_completely(overlaps: bool) -> None:
    async with engine(overlaps=overlaps, num_blocks=200) as client:
        requests = [Request(f"r{i}", [i, 7], max_tokens=3) for i in range(1000)]
        events = await read(client.open(requests), *(request.id for request in requests))
        outputs = {name: [token for event in got for token in event.token_ids] for name, got in events.items()}
        assert outputs == {f"r{i}": expected([i, 7], 3) for i in range(1000)}
        assert client.measured.load.kv_active_tokens == 0
        assert client.measured.totals.generated_tokens == 3000


@pytest.mark.parametrize("overlaps", [False, True])
async def test_prompts_count_as_queued_from_the_moment_they_are_sent_until_they_are_computed(overlaps: bool) -> None:
    """A gateway that is told less sends more: what the engine has not read yet is queued too."""
    seen: list[tuple[int, int]] = []

    def note(report: StepReport) -> None:
        seen.append((report.measured.load.num_running, client.queued_tokens))

    async with engine(overlaps=overlaps, on_report=note) as client:
        with client.open([Request("a", list(range(30)), max_tokens=50), endless("b")]):
            assert client.measured.load.steps == 0
            assert client.queued_tokens == 33
            await eventually_async(lambda: seen, lambda seen: (2, 0) in seen)
            assert client.measured.totals.received_tokens == 33


async def test_one_stream_carries_the_news_of_a_group() -> None:
    async with engine() as client:
        requests = [Request(f"r{i}", [5, 6], 4, SamplingParams(seed=i)) for i in range(3)]
        events = await read(client.open(requests), "r0", "r1", "r2")
        for i in range(3):
            assert [t for e in events[f"r{i}"] for t in e.token_ids] == expected([5, 6], 4, seed=i)
            assert events[f"r{i}"][-1].finish is FinishReason.LENGTH


async def test_closing_a_stream_ends_its_work() -> None:
    async with engine(step_s=SLOW) as client:
        with client.open([endless("a"), endless("b", first=9)]) as stream:
            await stream.next()
            await eventually_async(lambda: client.measured.load.num_running, lambda number: number == 2)
        assert client.num_open == 0
        await eventually_async(lambda: client.measured.load.num_running, lambda number: number == 0)
        assert client.measured.load.steps < 1500, "it was not run to its end"
        assert client.measured.load.kv_active_tokens == 0


async def test_closing_one_stream_leaves_the_others_alone() -> None:
    async with engine(step_s=0.001) as client:
        with client.open([endless("a")]) as closed:
            await closed.next()
            kept = client.open([Request("b", [4, 5], max_tokens=30)])
        events = await read(kept, "b")
        assert [t for e in events["b"] for t in e.token_ids] == expected([4, 5], 30)


async def test_closing_a_stream_twice_or_after_its_end_is_harmless() -> None:
    async with engine() as client:
        stream = client.open([Request("a", [1], max_tokens=2)])
        await read(stream, "a")
        stream.close()
        stream.close()
        assert await tokens_of(client, Request("b", [1], max_tokens=2)) == expected([1], 2)


# -- failing steps


async def test_a_step_that_fails_ends_those_in_it_and_nobody_else() -> None:
    async with engine(step_s=SLOW, max_num_seqs=1) as client:
        poisoned = client.open([Request("a", [POISON], max_tokens=3)])
        waiting = asyncio.create_task(tokens_of(client, Request("b", [1], max_tokens=3)))
        with pytest.raises(EngineFailed), poisoned:
            await poisoned.next()
        assert await waiting == expected([1], 3)
        assert client.restarts == 0
        assert client.measured.load.num_running == 0
        assert client.measured.load.kv_active_tokens == 0


async def test_steps_that_keep_failing_end_the_process_and_a_fresh_one_goes_on() -> None:
    async with engine() as client:
        first = engine_process(client)
        for i in range(3):
            with pytest.raises(EngineFailed), client.open([Request(f"r{i}", [POISON], max_tokens=3)]) as stream:
                await asyncio.wait_for(stream.next(), GIVE_UP_S)
        await eventually_async(lambda: client.restarts == 1 and is_ready(client))
        assert engine_process(client) != first
        assert await tokens_of(client, Request("b", [1], max_tokens=3)) == expected([1], 3)


async def test_failed_steps_with_good_ones_between_them_do_not_end_the_process() -> None:
    async with engine() as client:
        for i in range(5):
            with pytest.raises(EngineFailed), client.open([Request(f"r{i}", [POISON], max_tokens=3)]) as stream:
                await asyncio.wait_for(stream.next(), GIVE_UP_S)
            assert await tokens_of(client, Request(f"good{i}", [1], max_tokens=1)) == expected([1], 1)
        assert client.restarts == 0


# -- the life of the process


async def test_a_killed_process_fails_every_open_stream_at_once_and_is_started_again() -> None:
    reports: list[StepReport] = []
    pauses: list[float] = []
    may_return = asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await may_return.wait()

    client = EngineClient(launcher(step_s=SLOW), MonotonicClock(), on_report=reports.append, sleep=pause)
    await client.start()
    streams = [client.open([endless(f"r{i}")]) for i in range(5)]
    for stream in streams:
        await stream.next()
    engine_process(client).kill()
    for i, stream in enumerate(streams):
        with pytest.raises(EngineFailed):
            await read(stream, f"r{i}")
    assert client.num_open == 0
    assert client.state is EngineState.RESTARTING
    with pytest.raises(EngineUnavailable) as refused:
        client.open([endless("early")])
    assert refused.value.retry_after_s is not None
    assert reports[-1].measured.load.num_running == 0, "what the dead process ran is not shown as running"

    may_return.set()
    await eventually_async(lambda: is_ready(client))
    assert client.restarts == 1
    assert await tokens_of(client, Request("later", [1], max_tokens=3)) == expected([1], 3)
    engine_process(client).kill()
    await eventually_async(lambda: client.restarts == 2 and is_ready(client))
    assert pauses == [0.5, 1.0], "one that keeps dying is started ever later"
    await client.stop()


async def test_a_process_that_cannot_serve_its_model_raises_the_reason() -> None:
    loading: list[Loading] = []
    client = EngineClient(launcher(start="failed"), MonotonicClock(), on_loading=loading.append)
    with pytest.raises(ModelUnsupported, match="no such family"):
        await asyncio.wait_for(client.start(), GIVE_UP_S)
    assert client.state is EngineState.FAILED
    assert loading == [Loading("weights", 1, 2)]
    await client.stop()


async def test_a_process_that_ran_once_is_started_until_all_of_its_ranks_are_back() -> None:
    starts = iter(["ready", "rank lost", "rank lost", "ready"])
    pauses: list[float] = []

    async def launch(theirs: socket.socket) -> EngineProcess:
        return await launcher(start=next(starts))(theirs)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    client = EngineClient(launch, MonotonicClock(), sleep=pause)
    await client.start()
    engine_process(client).kill()
    await eventually_async(lambda: client.restarts == 3 and is_ready(client))
    assert pauses == [0.5, 1.0, 2.0]
    await client.stop()


async def test_a_process_that_ends_before_it_is_ready_is_an_error_and_not_tried_again() -> None:
    client = EngineClient(launcher(start="exit"), MonotonicClock())
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(client.start(), GIVE_UP_S)
    assert (client.state, client.restarts) == (EngineState.FAILED, 0)
    await client.stop()


async def test_a_process_that_cannot_be_started_is_an_error() -> None:
    async def launch(theirs: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec("/no/such/program")

    client = EngineClient(launch, MonotonicClock())
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(client.start(), GIVE_UP_S)
    await client.stop()


async def test_stopping_ends_the_process_and_every_stream() -> None:
    async with engine(step_s=SLOW) as client:
        stream = client.open([endless("a")])
        await stream.next()
        process = engine_process(client)
        await client.stop()
        with pytest.raises(RequestAborted):
            await stream.next()
        assert client.state is EngineState.STOPPED
        assert client.restarts == 0
        assert not process.is_running()
        with pytest.raises(EngineUnavailable):
            client.open([endless("b")])
        stream.close()


async def test_a_process_that_still_loads_is_not_waited_for() -> None:
    """It would read its mail too late: of its own it exits with another status."""
    is_loading = asyncio.Event()
    client = EngineClient(
        launcher(start="hang"), MonotonicClock(), on_loading=lambda _: is_loading.set(), stop_timeout_s=math.inf
    )
    starting = asyncio.create_task(client.start())
    await asyncio.wait_for(is_loading.wait(), GIVE_UP_S)
    await client.stop()
    assert client._process is not None
    assert await client._process.wait() == -signal.SIGKILL
    with pytest.raises(EngineFailed):
        await starting


class Deaf:
    """A process that reads no mail and takes a while to be given up."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        try:
            await self._ended.wait()
        finally:
            for _ in range(10):  # the client reads what is there meanwhile
                await asyncio.sleep(0)
        return 0

    def kill(self) -> None:
        self._ended.set()


async def test_a_process_that_becomes_ready_while_it_is_stopped_changes_nothing() -> None:
    is_loading, engines = asyncio.Event(), list[socket.socket]()

    async def launch(theirs: socket.socket) -> EngineProcess:
        engines.append(theirs.dup())
        engines[0].sendall(frame(Loading("weights", 0, 0)))
        return Deaf()

    client = EngineClient(launch, MonotonicClock(), on_loading=lambda _: is_loading.set())
    starting = asyncio.create_task(client.start())
    await asyncio.wait_for(is_loading.wait(), GIVE_UP_S)
    engines[0].sendall(frame(Ready(EngineInfo("cpu", "fake", "none", "fake", "fake", ServingLimits(), 0))))
    stopping = asyncio.create_task(client.stop())
    await eventually_async(lambda: client.info)
    assert client.state is EngineState.STOPPED
    await asyncio.wait_for(stopping, GIVE_UP_S)
    assert client.state is EngineState.STOPPED
    engines[0].close()
    await asyncio.gather(starting, return_exceptions=True)


async def test_a_process_whose_server_is_gone_ends_by_itself() -> None:
    for is_busy in (False, True):
        ours, theirs = socket.socketpair()
        with theirs:
            process = await launcher(step_s=SLOW)(theirs)
        with ours:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            while b"Ready" not in await loop.sock_recv(ours, 1 << 16):
                pass
            if is_busy:
                await loop.sock_sendall(ours, frame(Submit(endless("a"))))
                assert b"StepReport" in await loop.sock_recv(ours, 1 << 16)
        assert await asyncio.wait_for(process.wait(), GIVE_UP_S) == 0
