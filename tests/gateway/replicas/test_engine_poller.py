"""One contract for every kind of server: small fakes of those that cannot run here, and llama.cpp itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock.core.replica import UNBOUNDED
from penstock.dialects.dialect import Signal
from penstock.dialects.liveness import Liveness
from penstock.gateway.records.token_usage import find_usage
from penstock.health.settings import HealthSettings
from penstock.http.call import FailureKind
from tests.clocks import ManualClock, SlowClock
from tests.dialects.servers import FAKES, WORDS, FakeServer, FakeSglang, FakeTgi, FakeTriton, FakeTrtllm, FakeVllm
from tests.gateway.following import Following, InFlightRequest, following
from tests.gateway.llamacpp import llamacpp_serving
from tests.waiting import GIVE_UP_S, eventually_async

fakes = pytest.mark.parametrize("kind", FAKES, ids=lambda kind: kind.__name__)
with_load = pytest.mark.parametrize(
    "kind", [kind for kind in FAKES if kind is not FakeTriton], ids=lambda kind: kind.__name__
)


@contextlib.asynccontextmanager
async def followed(fake: FakeServer, **options: Any) -> AsyncIterator[Following]:
    with fake:
        async with following(fake.url, metrics=fake.url, clock=ManualClock(), **options) as found:
            found.upstream.render = lambda messages: messages[-1]["content"]
            yield found


async def meets_the_contract(found: Following, dialect: str) -> None:
    """Recognised, read, asked and left as every server must be."""
    await found.until(lambda: found.state == "ready")
    assert found.follower.dialect is not None
    assert found.follower.dialect.name == dialect
    assert found.seen.models == (found.replica.model,)

    said = await found.ask(prompt="Once upon a time", max_tokens=3)
    assert said.status == 200
    assert said.json["choices"][0]["finish_reason"] == "length"
    assert said.json["usage"]["completion_tokens"] == 3
    said = await found.ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert said.json["choices"][0]["message"]["content"]
    assert said.json["usage"]["completion_tokens"] == 3

    streamed = await found.ask(prompt="Once upon a time", max_tokens=3, stream=True)
    assert streamed.headers[b"content-type"].startswith(b"text/event-stream")
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in streamed.body.split(b"\n\n")[:-2] if event.startswith(b"data: ")]
    assert all(event["choices"] for event in events)  # the client did not ask for its usage
    usage = find_usage(streamed.body)
    assert usage is not None
    assert usage.output_tokens == 3


@fakes
async def test_a_fake_meets_the_contract(kind: type[FakeServer]) -> None:
    async with followed(kind()) as found:
        await meets_the_contract(found, kind.dialect)


@with_load
async def test_how_busy_it_is_is_read_from_the_server(kind: type[FakeServer]) -> None:
    async with followed(kind(running=5, waiting=2)) as found:
        await found.until(lambda: found.seen.load.num_running == 5)
        assert found.seen.load.num_waiting == 2
        assert 8000 <= found.seen.load.kv_active_tokens < 8100
        assert found.seen.limits.kv_capacity_tokens == 16_000
        assert found.seen.reports


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
async def test_a_server_that_says_what_is_no_number_is_read_again_when_it_says_one(number: Any) -> None:
    fake = FakeVllm(running=2)
    async with followed(fake) as found:
        await found.until(lambda: found.seen.load.num_running == 2)
        num_polls, fake.running = fake.num_polls, number
        await found.until(lambda: fake.num_polls > num_polls + 1)
        fake.running = 3
        await found.until(lambda: found.seen.load.num_running == 3)


async def test_a_server_that_cannot_say_how_busy_it_is_is_counted_by_what_was_sent() -> None:
    async with followed(FakeTriton(waiting=9)) as found:
        await found.until(lambda: found.state == "ready")
        assert not found.seen.reports
        assert found.seen.max_sequences == UNBOUNDED


async def test_a_server_without_metrics_is_used_and_counted_by_what_was_sent() -> None:
    async with followed(FakeVllm(has_metrics=False)) as found:
        await found.until(lambda: found.state == "ready")
        assert not found.seen.reports
        assert found.seen.limits.max_model_len == 4096  # that it did say


async def test_a_vllm_that_sleeps_is_parked_and_not_lost() -> None:
    async with followed(fake := FakeVllm()) as found:
        await found.until(lambda: found.state == "ready")
        assert not found.replica.is_resting
        fake.is_parked = True
        await found.until(lambda: found.replica.is_resting)
        assert found.state == "out"  # it is sent nothing
        fake.is_parked = False
        await found.until(lambda: found.state == "ready")
        assert not found.replica.is_resting


async def test_facts_come_from_where_each_server_keeps_them() -> None:
    async with followed(FakeSglang()) as found:
        await found.until(lambda: found.state == "ready")
        assert (found.seen.limits.max_model_len, found.seen.max_sequences, found.seen.limits.chunk_tokens) == (
            4096,
            48,
            256,
        )
    async with followed(FakeTgi()) as found:
        await found.until(lambda: found.state == "ready")
        assert (found.seen.limits.max_model_len, found.seen.max_sequences) == (4096, 128)


async def test_metrics_that_stop_coming_mean_degraded_and_never_idle() -> None:
    fake = FakeVllm(running=5)
    async with followed(fake) as found:
        await found.until(lambda: found.seen.load.num_running == 5)
        fake.has_metrics = False
        await found.until(lambda: found.state == "degraded")
        assert found.seen.load.num_running == 5
        fake.has_metrics = True
        await found.until(lambda: found.state == "ready")


async def test_metrics_under_names_that_nobody_knows_mean_degraded_too() -> None:
    class Renamed(FakeVllm):
        def documents(self) -> dict[str, Any]:
            status, headers, body = super().documents()["/metrics"]
            return super().documents() | {"/metrics": (status, headers, body.replace(b"_requests_", b"_reqs_"))}

    async with followed(Renamed()) as found:
        await found.until(lambda: found.state == "degraded")
        assert found.seen.reports


async def test_it_is_asked_four_times_a_second_and_no_more() -> None:
    fake = FakeVllm()
    async with followed(fake) as found:
        await found.until(lambda: found.state == "ready")
        before, began_s = fake.num_polls, found.upstream.clock.now()
        await found.until(lambda: fake.num_polls == before + 4)
        assert 0.75 <= round(found.upstream.clock.now() - began_s, 6) <= 1.0


@fakes
async def test_one_that_starts_is_waited_for_and_one_that_is_gone_is_out_at_once(kind: type[FakeServer]) -> None:
    fake = kind(is_starting=True)
    # vLLM does not listen before it is ready; asked while it starts it refuses
    dialect = None if kind is FakeVllm else kind.dialect
    async with followed(fake, dialect=dialect) as found:
        if kind is not FakeVllm:
            await found.until(lambda: found.follower.liveness is Liveness.STARTING)
            assert found.state == "out"
        fake.is_starting = False
        await found.until(lambda: found.state == "ready")
        request = InFlightRequest()
        found.replica.in_flight.add(request)
        fake.kill()
        await found.until(lambda: found.follower.liveness is Liveness.GONE)
        assert found.state == "out"
        assert request.is_lost
        with fake:  # on the same port
            await found.until(lambda: found.state == "ready")


async def test_a_trtllm_that_starts_again_is_not_called_failing() -> None:
    fake = FakeTrtllm()
    async with followed(fake) as found:
        await found.until(lambda: found.state == "ready")
        fake.is_starting = True
        await found.until(lambda: found.follower.liveness is Liveness.STARTING)
        assert found.state == "out"


async def test_one_that_dies_between_two_probes_is_out_at_the_next_reading() -> None:
    fake = FakeVllm()
    rare = HealthSettings(probe_every_s=60.0)
    async with followed(fake, health=rare) as found:
        await found.until(lambda: found.state == "ready")
        fake.kill()
        await found.until(lambda: found.follower.liveness is Liveness.GONE)
        assert found.state == "out"


@fakes
async def test_an_overloaded_server_says_so_in_a_way_that_sends_the_request_elsewhere(kind: type[FakeServer]) -> None:
    fake = kind()
    async with followed(fake) as found:
        await found.until(lambda: found.state == "ready")
        fake.is_overloaded = True
        said = await found.ask(prompt="Hi")
        assert said.status in (429, 503, 529)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@fakes
async def test_a_client_that_leaves_stops_the_work(kind: type[FakeServer], is_stream: bool) -> None:
    fake = kind(token_s=0.05)
    async with followed(fake) as found:
        await found.until(lambda: found.follower.dialect is not None)
        body = json.dumps({"model": "m", "prompt": "Hi", "stream": is_stream}).encode()
        call, _ = found.send("/v1/completions", body)
        await eventually_async(lambda: fake.running, lambda num_running: num_running == 1)
        call.cancel()
        await eventually_async(lambda: (fake.num_left, fake.running), lambda counts: counts == (1, 0))


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang], ids=["counts its steps", "does not"])
async def test_one_whose_steps_stand_still_hangs_though_its_health_is_good(kind: type[FakeServer]) -> None:
    fake = kind(running=1)
    async with followed(fake) as found:
        await found.until(lambda: found.state == "ready")
        request = InFlightRequest()
        found.replica.in_flight.add(request)
        began_s = found.upstream.clock.now()
        await found.until(lambda: found.upstream.clock.now() > began_s + 0.8)  # longer than one may hang
        assert found.state == "ready"
        fake.is_hung = True
        await found.until(lambda: request.is_lost)  # no step, and no first token
        assert found.state == "out"
        fake.is_hung = False
        await found.until(lambda: found.state == "ready")  # deep probes have brought it back


async def test_a_request_that_its_server_cannot_be_told_is_refused_here() -> None:
    async with followed(FakeTriton(), dialect="triton") as found:
        await found.until(lambda: found.state == "ready")
        said = await found.ask(prompt="Hi", tools=[{}])
        assert said.status == 400
        assert said.json["error"]["param"] == "tools"
        call, received = found.send("/v1/completions", b"{")
        call.cancel()
        await found.ask(prompt="Hi")
        assert received.status == 0  # who has left is told nothing


async def test_tgi_without_the_messages_api_is_asked_over_generate() -> None:
    async with followed(FakeTgi(), dialect="tgi-generate") as found:
        await meets_the_contract(found, "tgi-generate")
        said = await found.ask(prompt="Hi", max_tokens=50)
        assert said.json["choices"][0]["text"] == "".join(WORDS)


async def test_who_refuses_connections_is_told_apart_from_who_is_overloaded() -> None:
    fake = FakeVllm()
    with fake:
        pass
    async with following(fake.url, dialect="vllm") as found:
        said = await found.ask(prompt="Hi")
        assert said.failure is not None
        assert said.failure.kind is FailureKind.REFUSED
        assert not said.failure.was_sent


# -- the real one


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[str]:
    with llamacpp_serving() as found:
        yield found.url


@pytest.mark.slow
async def test_llamacpp_meets_the_contract(llamacpp: str) -> None:
    async with following(llamacpp, model="smollm2", clock=SlowClock()) as found:
        await meets_the_contract(found, "llamacpp")
        assert (found.seen.max_sequences, found.seen.limits.max_model_len) == (2, 512)
        calls = [
            found.send("/v1/completions", b'{"model":"smollm2","prompt":"Once","max_tokens":200,"stream":true}')[0]
            for _ in range(3)
        ]
        await found.until(lambda: (found.seen.load.num_running, found.seen.load.num_waiting) == (2, 1))
        steps = found.seen.load.steps
        await found.until(lambda: found.seen.load.steps > steps)
        for call in calls:
            call.cancel()
        await found.until(lambda: found.seen.sequences == 0)  # clients that leave end the work


@pytest.mark.slow
async def test_llamacpp_without_metrics_has_slots(llamacpp: str) -> None:
    from penstock.dialects import reading
    from penstock.dialects.engines.llamacpp import SLOTS
    from penstock.gateway.replicas.fetch import fetch
    from penstock.http.upstream import Upstream

    upstream = Upstream.from_url(llamacpp)
    answer = await fetch(upstream, SLOTS.path, b"", timeout_s=GIVE_UP_S)
    upstream.close()
    assert reading.read(SLOTS, answer[2]) == {Signal.RUNNING: 0.0}
