"""Requests that are held: what their clients see while they wait, and afterwards. On a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from tools.gateway_calls import EVENT, LAST, TURNS, WHOLE, FakeUpstream, UsageCount

from penstock.admission.admission import Admission
from penstock.admission.expected import Expected
from penstock.core.errors import InvalidRequest
from penstock.gateway.app import Gateway
from penstock.gateway.monitor.state import state_of
from penstock.gateway.proxy.holding import COMMENT_EVERY_S, FIRST_COMMENT_S
from penstock.gateway.proxy.request_view import max_wait_s
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.settings.gateway import ModelSettings, routes_of
from penstock.gateway.tenant_services import TenantServices
from penstock.http.call import Receiver
from penstock.http.exchange import Exchange
from penstock.http.message import Request, ResponseHead
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.limits.limiter import LocalLimiter
from tests.clocks import ManualClock
from tests.gateway.running import RunningGateway, running_gateway
from tests.sdk import Unverified
from tests.server.replica import NAME, serving
from tests.server.replica import Replica as Server
from tests.waiting import GIVE_UP_S, eventually

EVENTS = ResponseHead(200, {b"content-type": b"text/event-stream"})


class FakeChannel:
    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.sent = b""
        self.is_over = False

    def send(self, data: bytes) -> None:
        self.sent += data

    def answered(self, close: bool) -> None:
        self.is_over = True

    def drop(self) -> None: ...

    @property
    def head(self) -> bytes:
        return self.sent.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        """Without the marks of its chunks."""
        rest, body = self.sent.partition(b"\r\n\r\n")[2], b""
        if b"chunked" not in self.head:
            return rest
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return body


class Held:
    """A gateway without a replica of its model, whose controller says when there will be one."""

    def __init__(self, eta_s: float | None = 12.0, hold_s: float = 60.0, **settings: Any) -> None:
        self.clock = ManualClock()
        self.answers: list[Receiver] = []
        self.usages = UsageCount()
        services = TenantServices(KeyRing(), LocalLimiter(self.clock.now), Budgets(), self.usages)
        models = {"m": ModelSettings(**settings), "other": ModelSettings()}
        self.gateway = Gateway(routes_of(models), services, Admission(), clock=self.clock)
        self.expect(eta_s, hold_s)

    def expect(self, eta_s: float | None, hold_s: float = 60.0) -> None:
        now = self.clock.now()
        ready_at = None if eta_s is None else now + eta_s
        self.gateway.admission.expect({"m": Expected(hold_s, ready_at, 0.0, until=now + 30.0)}, now)
        self.gateway.queue.decide()

    def ask(self, path: bytes = b"/v1/chat/completions", *, stream: bool = True, **headers: str) -> FakeChannel:
        channel = FakeChannel()
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": stream}
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        request = Request(b"POST", path, named, json.dumps(asked).encode())
        self.exchange = Exchange(channel, request, keep_alive=True, speaks_chunked=True)
        self.gateway(self.exchange)
        return channel

    async def add_replica(self, model: str = "m") -> None:
        url = f"http://{model}:1"
        replica = Replica(url, model=model, upstream=FakeUpstream(self.answers), probe_every_s=0.0, id=url)
        self.gateway.replicas.add(replica)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def num_waiting(self) -> int:
        return self.gateway.admission.num_waiting("m")


@pytest.fixture
def held() -> Iterator[Held]:
    found = Held()
    yield found
    found.gateway.close()


async def test_a_stream_gets_comments_with_the_time_that_is_left_and_then_its_answer(held: Held) -> None:
    channel = held.ask()
    assert (channel.sent, held.num_waiting) == (b"", 1)
    held.clock.advance(FIRST_COMMENT_S)
    assert channel.head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/event-stream" in channel.head
    assert b"x-request-id: " in channel.head
    assert channel.body == b": waiting for a replica, ready in about 11 s\n\n"
    held.clock.advance(COMMENT_EVERY_S)
    assert channel.body.endswith(b": waiting for a replica, ready in about 6 s\n\n")
    before = channel.body
    await held.add_replica()
    (receiver,) = held.answers
    receiver.head(EVENTS)
    receiver.data(EVENT, False)
    assert channel.body == before + EVENT
    receiver.data(LAST, True)
    whole = channel.body
    assert whole.startswith(before + EVENT)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert (channel.is_over, held.usages.num, channel.sent.count(b"HTTP/1.1")) == (True, 1, 1)
    held.clock.advance(60.0)
    assert channel.body == whole


async def test_one_that_waits_for_a_moment_is_answered_as_if_it_had_not_waited(held: Held) -> None:
    channel = held.ask()
    held.clock.advance(FIRST_COMMENT_S / 2)
    await held.add_replica()
    held.answers[0].head(ResponseHead(400, {b"content-type": b"application/json", b"content-length": b"2"}))
    held.answers[0].data(b"{}", True)
    assert channel.head.startswith(b"HTTP/1.1 400 ")
    assert channel.body == b"{}"


async def test_a_request_that_is_no_stream_just_waits(held: Held) -> None:
    channel = held.ask(stream=False)
    held.clock.advance(10.0)
    assert channel.sent == b""
    await held.add_replica()
    length = str(len(WHOLE)).encode()
    held.answers[0].head(ResponseHead(200, {b"content-type": b"application/json", b"content-length": length}))
    held.answers[0].data(WHOLE, True)
    assert channel.body == WHOLE


async def test_a_wait_beyond_the_deadline_is_refused_at_once_with_the_time() -> None:
    held = Held(eta_s=90.0)
    channel = held.ask()
    assert channel.head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 90" in channel.head
    error = json.loads(channel.body)["error"]
    assert (error["reason"], "expected in about 90 s" in error["message"]) == ("no_replica", True)
    assert held.ask(x_penstock_max_wait="100").sent == b""  # its own deadline
    held.expect(12.0)
    assert b"retry-after: 12" in held.ask(x_penstock_max_wait="11").head
    assert held.ask(x_penstock_max_wait="soon").head.startswith(b"HTTP/1.1 400 ")
    held.gateway.close()


@pytest.mark.parametrize("said", [b"", b"-1", b"nan", b"inf", b"3601", b"soon", b"\xb2"])
def test_a_wait_that_is_none_is_refused(said: bytes) -> None:
    with pytest.raises(InvalidRequest, match="x-penstock-max-wait"):
        max_wait_s(said)
    assert (max_wait_s(b" 1.5 "), max_wait_s(b"0")) == (1.5, 0.0)


async def test_a_time_that_slips_is_told_as_an_error_with_the_new_time(held: Held) -> None:
    stream, whole = held.ask(), held.ask(stream=False)
    anthropics = held.ask(b"/v1/messages")
    held.clock.advance(FIRST_COMMENT_S)
    held.expect(eta_s=200.0)
    assert whole.head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 200" in whole.head
    last = stream.body.split(b"\n\n")[-2]
    assert "expected in about 200 s" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert b"event: error\ndata: " in anthropics.body
    assert (stream.is_over, whole.is_over, anthropics.is_over, held.num_waiting) == (True, True, True, 0)


@pytest.mark.parametrize(("path", "mark"), [(b"/v1/chat/completions", b"data: "), (b"/v1/messages", b"event: error\n")])
async def test_an_error_of_the_replica_is_an_event_after_comments(held: Held, path: bytes, mark: bytes) -> None:
    channel = held.ask(path)
    held.clock.advance(FIRST_COMMENT_S)
    await held.add_replica()
    held.answers[0].head(ResponseHead(400, {b"content-type": b"application/json"}))
    held.answers[0].data(b'{\n  "error": ', False)
    held.answers[0].data(b'{"message": "no"}\n}', True)
    event = channel.body.partition(b"\n\n")[2]
    assert event.startswith(mark)
    assert event.endswith(b'data: {   "error": {"message": "no"} }\n\n')
    assert channel.is_over


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(held: Held) -> None:
    held.ask()
    held.clock.advance(FIRST_COMMENT_S)
    held.exchange.lost()
    assert (held.num_waiting, held.usages.num) == (0, 0)
    held.clock.advance(1.0)  # the queue's own timer is the last
    assert held.clock.waits_s == []


async def test_a_held_stream_may_go_on_to_the_next_model() -> None:
    held = Held(fallback=["other"], slow_after_s=3.0)
    await held.add_replica("other")
    channel = held.ask()
    held.clock.advance(3.0)
    held.answers[0].head(EVENTS)
    held.answers[0].data(EVENT + LAST, True)
    assert channel.body.startswith(b": waiting for a replica, ready in about 11 s\n\n" + EVENT)
    assert channel.is_over
    held.gateway.close()


async def test_what_is_held_is_shown_and_how_long_it_was_is_counted(held: Held) -> None:
    held.ask()
    held.clock.advance(10.0)
    gateway = held.gateway
    state = state_of(gateway.replicas.values(), gateway.pools, gateway.admission, gateway.now())
    assert [(queue.model, queue.held, queue.eta_s) for queue in state.queues] == [("m", 1, 2.0)]
    gateway.recorder.look(state)
    assert b'penstock_gateway_held_requests{model="m"} 1' in gateway.recorder.render()
    await held.add_replica()
    assert b'penstock_gateway_hold_wait_seconds_sum{model="m"} 10.0' in gateway.recorder.render()
    assert gateway.admission.num_waiting("m") == 0


# -- real clients


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def standby(server: Server) -> Iterator[RunningGateway]:
    """A gateway whose one replica is real and stands by."""
    with running_gateway(server, clock=ManualClock()) as gateway:
        use(gateway, "standby")
        expected = Expected(60.0, gateway.clock.now() + 12.0, 0.0, until=gateway.clock.now() + 30.0)
        gateway.call(lambda: gateway.app.admission.expect({NAME: expected}, gateway.clock.now()))
        yield gateway


def use(gateway: RunningGateway, state: str) -> None:
    (replica,) = gateway.app.replicas.values()

    def change() -> None:
        replica.keep_in(state, is_draining=bool(state))
        gateway.app.replicas.changed(replica)

    gateway.call(change)


def begin(gateway: RunningGateway, create: Callable[[], Any]) -> Any:
    """The stream of a request that waits: its client has the head as soon as a comment was sent."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(create)
        eventually(lambda: gateway.app.admission.num_waiting(NAME), lambda num: num == 1)
        gateway.advance(FIRST_COMMENT_S)
        return asked.result(GIVE_UP_S)


def streamed(gateway: RunningGateway) -> dict[str, Callable[[], Any]]:
    """A stream of each of the official clients."""
    messages: Any = [{"role": "user", "content": "hi"}]
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, http_client=Unverified())
    asked: Any = {"model": NAME, "messages": messages, "max_tokens": 4, "stream": True}
    return {
        "openai": lambda: gateway.openai.chat.completions.create(**asked),
        "anthropic": lambda: client.messages.create(**asked),
    }


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_real_client_skips_the_comments_and_reads_its_stream(standby: RunningGateway, sdk: str) -> None:
    stream = begin(standby, streamed(standby)[sdk])
    use(standby, "")
    events = list(stream)
    if sdk == "openai":
        assert events[-1].choices[0].finish_reason == "length"
    else:
        assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


@pytest.mark.parametrize(("sdk", "error"), [("openai", openai.APIError), ("anthropic", anthropic.APIError)])
def test_a_real_client_raises_the_error_that_ends_its_wait(
    standby: RunningGateway, sdk: str, error: type[Exception]
) -> None:
    stream = begin(standby, streamed(standby)[sdk])
    late = Expected(60.0, standby.clock.now() + 500.0, 0.0, until=standby.clock.now() + 30.0)

    def slip() -> None:
        standby.app.admission.expect({NAME: late}, standby.clock.now())
        standby.app.queue.decide()

    standby.call(slip)
    with pytest.raises(error, match="expected in about 500 s"):
        list(stream)
