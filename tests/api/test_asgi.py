"""The toolkit driven by plain receive and send callables, then once behind a real server."""

import asyncio
import http.client
import json
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.api import sse
from penstock.api.asgi import Handler, Message, Request, Route, Router
from penstock.api.openai import ChatChunks, ResponseHead, parse_chat
from penstock.api.sink import Sink, SseStream, json_response
from penstock.core.errors import BodyTooLarge, EngineFailed, InvalidRequest, Overloaded, RequestAborted
from tests.api.serving import running
from tests.waiting import GIVE_UP_S

DISCONNECT: Message = {"type": "http.disconnect"}


class Exchange:
    """One HTTP exchange without a network: what arrives is given, what is sent is kept."""

    def __init__(self, method: str, path: str, arriving: list[Message] | None = None, **headers: str) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": ("10.0.0.1", 5)}
        self.arriving = [{"type": "http.request", "body": b""}] if arriving is None else list(arriving)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if not self.arriving:
            await asyncio.Event().wait()  # the client is there, and says nothing
        return self.arriving.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(dict(message))

    async def through(self, app: Router) -> "Exchange":
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def request(self) -> Request:
        return Request(self.scope, self.receive)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def only(handler: Handler, method: str = "POST") -> Router:
    return Router([Route(method, "/", handler)])


async def say_ok(request: Request, sink: Sink) -> None:
    await json_response(sink, 200, b'{"ok":true}')


async def say_param(request: Request, sink: Sink) -> None:
    await json_response(sink, 200, json.dumps(request.path_param).encode())


APP = Router(
    [
        Route("GET", "/v1/models", say_ok),
        Route("GET", "/v1/models/{model}", say_param),
        Route("POST", "/v1/things", say_ok),
        Route("DELETE", "/v1/things", say_ok),
    ]
)


# Requests


async def test_a_body_arrives_whole() -> None:
    exchange = Exchange("POST", "/", [part(b"ab", more=True), part(b"", more=True), part(b"c")])
    assert await exchange.request.body(3) == b"abc"


async def test_a_declared_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(BodyTooLarge):
        await Exchange("POST", "/", [], content_length="4").request.body(3)


async def test_an_undeclared_length_over_the_limit_is_refused_as_soon_as_it_is_passed() -> None:
    exchange = Exchange("POST", "/", [part(b"ab", more=True), part(b"cd", more=True), part(b"never read")])
    with pytest.raises(BodyTooLarge):
        await exchange.request.body(3)
    assert len(exchange.arriving) == 1


@pytest.mark.parametrize("length", ["x", "", "9" * 5000])
async def test_a_content_length_that_is_no_number_is_refused(length: str) -> None:
    with pytest.raises(InvalidRequest):
        await Exchange("POST", "/", content_length=length).request.body(3)


async def test_a_client_that_leaves_during_its_upload_is_answered_with_nothing() -> None:
    async def read(request: Request, sink: Sink) -> None:
        await request.body(100)

    exchange = await Exchange("POST", "/", [part(b"ab", more=True), DISCONNECT]).through(only(read))
    assert exchange.sent == []


async def test_header_names_are_lower_case_and_the_client_is_known() -> None:
    request = Exchange("GET", "/", X_Thing="1").request
    assert request.headers == {"x-thing": "1"}
    assert request.client == "10.0.0.1"


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(RequestAborted):
        await Exchange("POST", "/", [DISCONNECT]).request.while_connected(work())
    assert cancelled.is_set()


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def double(number: int) -> int:
        if number < 0:
            raise InvalidRequest("negative")
        return number * 2

    request = Exchange("POST", "/", []).request
    assert await request.while_connected(double(2)) == 4
    with pytest.raises(InvalidRequest):
        await request.while_connected(double(-1))
    assert len(asyncio.all_tasks()) == 1


async def test_work_is_cancelled_when_its_caller_is() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    caller = asyncio.ensure_future(Exchange("POST", "/", []).request.while_connected(work()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert cancelled.is_set()


# Routes


async def test_a_trailing_parameter_takes_the_rest_of_the_path() -> None:
    exchange = await Exchange("GET", "/v1/models/org/name").through(APP)
    assert json.loads(exchange.body) == "org/name"


@pytest.mark.parametrize("path", ["/", "/v1/model", "/v1/models/", "/v1/things/1", "/v1/models{model}"])
async def test_an_unknown_path_is_404_in_json(path: str) -> None:
    exchange = await Exchange("GET", path).through(APP)
    assert (exchange.status, exchange.error["code"]) == (404, "not_found")
    assert exchange.headers["content-type"] == "application/json"


async def test_a_wrong_method_is_405_and_says_what_is_allowed() -> None:
    exchange = await Exchange("GET", "/v1/things").through(APP)
    assert (exchange.status, exchange.error["code"]) == (405, "method_not_allowed")
    assert exchange.headers["allow"] == "DELETE, OPTIONS, POST"


async def test_options_says_what_is_allowed() -> None:
    exchange = await Exchange("OPTIONS", "/v1/models").through(APP)
    assert (exchange.status, exchange.headers["allow"], exchange.body) == (204, "GET, HEAD, OPTIONS", b"")


async def test_head_is_get_without_its_body() -> None:
    exchange = await Exchange("HEAD", "/v1/models").through(APP)
    assert (exchange.status, exchange.headers["content-length"], exchange.body) == (200, "11", b"")


# Request ids


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere"])
async def test_every_response_carries_the_clients_request_id(path: str) -> None:
    exchange = await Exchange("GET", path, x_request_id="abc-1._X").through(APP)
    assert exchange.headers["x-request-id"] == "abc-1._X"


@pytest.mark.parametrize("bad", ["", "a b", "a\nb", "x" * 129, "é", "a\n"])
async def test_a_request_id_that_is_not_sane_is_replaced(bad: str) -> None:
    exchange = await Exchange("GET", "/v1/models", x_request_id=bad).through(APP)
    assert exchange.headers["x-request-id"] != bad
    assert len(exchange.headers["x-request-id"]) == 32


# Errors


async def test_an_error_of_ours_becomes_its_response() -> None:
    async def refuse(request: Request, sink: Sink) -> None:
        raise Overloaded("busy", retry_after_s=3)

    exchange = await Exchange("POST", "/").through(only(refuse))
    assert (exchange.status, exchange.headers["retry-after"]) == (429, "3")
    assert exchange.error["message"] == "busy"


async def test_a_bug_is_logged_with_its_traceback_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def break_down(request: Request, sink: Sink) -> None:
        raise KeyError("the secret")

    with caplog.at_level(logging.ERROR, logger="penstock"):
        exchange = await Exchange("POST", "/", x_request_id="r1").through(only(break_down))
    assert exchange.status == 500
    assert b"secret" not in exchange.body
    assert "r1" in exchange.error["message"]
    assert "r1" in caplog.text
    assert "the secret" in caplog.text


async def test_a_body_too_large_closes_the_connection() -> None:
    async def read(request: Request, sink: Sink) -> None:
        await request.body(1)

    exchange = await Exchange("POST", "/", content_length="10").through(only(read))
    assert (exchange.status, exchange.headers["connection"]) == (413, "close")


# Streams


async def events_until(error: Exception | None) -> AsyncIterator[bytes]:
    yield sse.event(b"1")
    if error:
        raise error
    yield sse.DONE


def streaming(error: Exception | None) -> Router:
    async def stream_events(request: Request, sink: Sink) -> None:
        async with SseStream(sink) as stream:
            async for frame in events_until(error):
                await stream.write(frame)

    return only(stream_events)


async def test_a_stream_starts_writes_and_closes() -> None:
    exchange = await Exchange("POST", "/").through(streaming(None))
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["x-request-id"]
    assert exchange.body == b"data: 1\n\n" + sse.DONE
    assert [message.get("more_body", False) for message in exchange.sent[1:]] == [True, True, False]


async def test_an_error_in_mid_stream_is_an_event_and_the_stream_closes() -> None:
    exchange = await Exchange("POST", "/").through(streaming(EngineFailed("died")))
    assert exchange.status == 200
    assert exchange.body == b"data: 1\n\n" + sse.error_event(EngineFailed("died"))
    assert not exchange.sent[-1].get("more_body", False)


async def test_a_bug_in_mid_stream_is_an_event_that_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exchange = await Exchange("POST", "/").through(streaming(KeyError("the secret")))
    assert b"internal error" in exchange.body
    assert b"secret" not in exchange.body
    assert "the secret" in caplog.text


async def test_writing_to_a_client_that_has_gone_aborts_the_work() -> None:
    written = []

    async def write_on(request: Request, sink: Sink) -> None:
        await request.body(10)
        async with SseStream(sink) as stream:
            for number in range(3):
                written.append(number)
                await stream.write(b"x")
                await request.watch_disconnect()

    exchange = await Exchange("POST", "/", [part(b""), DISCONNECT]).through(only(write_on))
    assert written == [0, 1]
    assert len(exchange.sent) == 2


async def test_a_server_that_reports_a_lost_connection_aborts_the_work(caplog: pytest.LogCaptureFixture) -> None:
    async def lost(message: Message) -> None:
        raise BrokenPipeError

    exchange = Exchange("POST", "/")
    await streaming(None)(exchange.scope, exchange.receive, lost)
    assert caplog.text == ""


# Life span


async def lifespan(app: Router) -> list[Message]:
    arriving = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    return sent


async def test_startup_and_shutdown_are_called_in_turn() -> None:
    calls = []

    async def up() -> None:
        calls.append("up")

    async def down() -> None:
        calls.append("down")

    sent = await lifespan(Router([], startup=up, shutdown=down))
    assert calls == ["up", "down"]
    assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert await lifespan(Router([])) == sent


async def test_a_startup_that_fails_says_so() -> None:
    async def up() -> None:
        raise EngineFailed("no device")

    sent = await lifespan(Router([], startup=up))
    assert sent == [{"type": "lifespan.startup.failed", "message": "no device"}]


# A real server


async def chat(request: Request, sink: Sink) -> None:
    """Streams the client's own words back, and breaks when asked to."""
    asked = parse_chat(await request.body(10_000))
    chunks = ChatChunks(ResponseHead("chatcmpl-1", asked.model, 0))
    async with SseStream(sink) as stream:
        await stream.write(sse.event(chunks.start(0) or b""))
        for word in asked.conversation()[-1]["content"].split():
            if word == "break":
                raise EngineFailed("the engine died")
            await stream.write(sse.event(chunks.text(0, word)))
        await stream.write(sse.DONE)


def test_a_real_server_answers_streams_and_refuses() -> None:
    with running(Router([Route("POST", "/v1/chat/completions", chat), Route("GET", "/v1/models", say_ok)])) as address:
        connection = http.client.HTTPConnection(*address, timeout=GIVE_UP_S)
        body = b'{"model":"m","messages":[{"role":"user","content":"a b"}]}'
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/x-www-form-urlencoded"})
        response = connection.getresponse()
        assert response.read().endswith(sse.DONE)
        assert response.headers["x-request-id"]

        connection.request("HEAD", "/v1/models", headers={"X-Request-Id": "mine"})
        response = connection.getresponse()
        assert (response.status, response.read(), response.headers["x-request-id"]) == (200, b"", "mine")

        connection.request("POST", "/v1/chat/completions", b"{nonsense")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (400, "invalid_request")

        connection.request("POST", "/v1/chat/completions", b"x" * 20_000)
        response = connection.getresponse()
        assert (response.status, response.headers["connection"]) == (413, "close")
        connection.close()


def test_the_openai_client_reads_a_stream_and_raises_on_an_error_within_it() -> None:
    with (
        running(Router([Route("POST", "/v1/chat/completions", chat)])) as (host, port),
        openai.OpenAI(api_key="none", base_url=f"http://{host}:{port}/v1", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "one two break three"}], stream=True
        )
        assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", "one", "two"]
        with pytest.raises(openai.APIError, match="the engine died"):
            next(stream)


def test_a_real_client_that_leaves_ends_the_work() -> None:
    left = []
    at_work = threading.Event()

    async def wait(request: Request, sink: Sink) -> None:
        await request.body(100)
        at_work.set()
        try:
            await request.while_connected(asyncio.Event().wait())
        except RequestAborted:
            left.append(request.id)
            raise

    with running(only(wait)) as address:
        connection = http.client.HTTPConnection(*address, timeout=GIVE_UP_S)
        connection.request("POST", "/", b"{}", {"X-Request-Id": "gone"})
        assert at_work.wait(GIVE_UP_S)
        connection.close()
    assert left == ["gone"]
