"""Calls and CPU time of one request at the gateway: `python -m tools.gateway_calls [--names] [--process]`.

The real `Gateway`, with a tenant and limits that nobody reaches, in front of four upstreams that answer at once and
without a socket. Calls are counted for one request, which does not depend on the machine; CPU time is the best of some
rounds. What the sockets, the parser and the logs' threads cost is left out.

`--process` has them: all of `penstock gateway` as `penstock bench gateway` starts it, in this process, with sockets, a
store, the request log and the decision log, and calls of all threads, a request, over two thousand whole answers; less
what the same process does in as long without requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from penstock.admission.admission import Admission
from penstock.core.replica import ReplicaState
from penstock.gateway.app import Gateway
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.settings.gateway import ModelSettings, routes_of
from penstock.gateway.tenant_services import TenantServices
from penstock.http.call import Call, Receiver
from penstock.http.exchange import Exchange
from penstock.http.message import Request, ResponseHead
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import KeyRing, TenantState, new_key
from penstock.tenancy.limits.limiter import LocalLimiter
from penstock.tenancy.tenants import tenant_from
from penstock.tenancy.usage import Usage

REPLICAS, REQUESTS, ROUNDS, EVENTS = 4, 2000, 7, 16
TURNS = 10  # of the event loop, in which the gateway finds out what its upstreams are
LIMITS = {"requests_per_minute": 10**8, "tokens_per_minute": 10**12, "concurrency": 10**6}
WHOLE = msgspec.json.encode(
    {
        "id": "cmpl-1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20},
    }
)
EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"delta":{"content":" hello"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":8,"total_tokens":20}}\n\ndata: [DONE]\n\n'


class FakeUpstream(DialectUpstream):
    """Answers are given by the caller, when it wants: `answers` has the receivers."""

    def __init__(self, answers: list[Receiver]) -> None:
        super().__init__("127.0.0.1", 9)
        self._answers = answers

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        """The gateway's own question for reports: there are none, so this is some other server."""
        call = Call(self, receiver, b"", b"", is_head_only=False)
        asyncio.get_running_loop().call_soon(receiver.head, ResponseHead(404, {}))
        asyncio.get_running_loop().call_soon(receiver.data, b"", True)
        return call

    def send_prepared(self, prepared: Any, headers: bytes, receiver: Receiver) -> Call:
        received = prepared.received_by(receiver)
        self._answers.append(received)
        return Call(self, received, b"", b"", is_head_only=False)


class FakeChannel:
    peer = "127.0.0.1"

    def __init__(self) -> None:
        self.num_bytes, self.num_answered = 0, 0

    def send(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def answered(self, close: bool) -> None:
        self.num_answered += 1

    def drop(self) -> None:
        raise AssertionError("dropped")


class UsageCount:
    def __init__(self) -> None:
        self.num = 0

    def record(self, usage: Usage) -> None:
        self.num += 1


class Calls:
    """Calls of functions: those in Python by name, those in C by who calls them."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Of this thread."""
        sys.setprofile(self.count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def count(self, frame: FrameType, event: str, function: object) -> None:
        code = frame.f_code
        if code.co_filename == __file__:
            return
        if event == "call":
            self.python[f"{_place(code.co_filename)}:{code.co_qualname}"] += 1
        elif event == "c_call":
            name = getattr(function, "__qualname__", repr(function))
            self.c[f"{_place(code.co_filename)}:{code.co_qualname} -> {name}"] += 1

    def show(self, what: str, per: int = 1, *, names: bool) -> str:
        python, in_c = self.python.total() / per, self.c.total() / per
        lines = [f"{what}: {python:.0f} calls, {in_c:.0f} calls in C"]
        for counts in (self.python, self.c) if names else ():
            lines += [f"  {count / per:6.2f} {name}" for name, count in counts.most_common() if count / per >= 0.05]
        return "\n".join(lines)


def _place(filename: str) -> str:
    """The file within penstock, or within whatever it is of."""
    return filename.rpartition("penstock/")[2] if "penstock/" in filename else "/".join(Path(filename).parts[-2:])


class Bench:
    def __init__(self) -> None:
        self._answers: list[Receiver] = []
        self._channel, self._usages = FakeChannel(), UsageCount()
        keys, key = KeyRing(), new_key("bench", now_s=0.0)
        keys.apply([TenantState("bench", tenant_from({"id": "bench", "limits": LIMITS}), (key.record,))])
        urls = [f"http://127.0.0.1:{9000 + number}" for number in range(REPLICAS)]
        replicas = [
            Replica(url, model="m", upstream=FakeUpstream(self._answers), probe_every_s=0.0, id=url) for url in urls
        ]
        services = TenantServices(keys, LocalLimiter(time.monotonic), Budgets(), self._usages)
        self.gateway = Gateway(routes_of({"m": ModelSettings(replicas=urls)}), services, Admission())
        for replica in replicas:
            self.gateway.replicas.add(replica)
        self._headers = {b"authorization": b"Bearer " + key.secret.encode(), b"content-type": b"application/json"}

    @property
    def is_ready(self) -> bool:
        return all(one.snapshot.state is ReplicaState.READY for one in self.gateway.replicas.values())

    def exchange(self, number: int, *, stream: bool) -> Exchange:
        messages = [{"role": "user", "content": f"{number}: what is a penstock?"}]
        body = msgspec.json.encode({"model": "m", "messages": messages, "max_tokens": 64, "stream": stream})
        request = Request(b"POST", b"/v1/chat/completions", dict(self._headers), body)
        return Exchange(self._channel, request, keep_alive=True, speaks_chunked=True)

    def run(self, exchange: Exchange, *, stream: bool) -> None:
        """One request, from its arrival to its end."""
        self.gateway(exchange)
        receiver = self._answers.pop()
        if stream:
            receiver.head(ResponseHead(200, {b"content-type": b"text/event-stream"}))
            for _ in range(EVENTS):
                receiver.data(EVENT, False)
            receiver.data(LAST, True)
        else:
            receiver.head(ResponseHead(200, {b"content-type": b"application/json", b"content-length": b"170"}))
            receiver.data(WHOLE, True)

    def calls(self, *, stream: bool) -> Counter[str]:
        """Python functions that one request calls."""
        return self.all_calls(stream=stream).python

    def all_calls(self, *, stream: bool) -> Calls:
        """The same, and those in C."""
        calls, exchange = Calls(), self.exchange(0, stream=stream)
        with calls.counted():
            self.run(exchange, stream=stream)
        return calls

    def cpu_us(self, *, stream: bool) -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            exchanges = [self.exchange(number, stream=stream) for number in range(REQUESTS)]
            began = time.process_time()
            for exchange in exchanges:
                self.run(exchange, stream=stream)
            best = min(best, time.process_time() - began)
        return 1e6 * best / REQUESTS

    def check(self, num_requests: int) -> None:
        assert self._channel.num_answered == self._usages.num == num_requests


async def measure(*, names: bool) -> None:
    bench = Bench()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert bench.is_ready
    num = 0
    for stream in (False, True):
        for _ in range(50):  # metrics open their series, caches fill
            bench.run(bench.exchange(0, stream=stream), stream=stream)
        calls = bench.all_calls(stream=stream)
        num += 51 + ROUNDS * REQUESTS
        what = f"a stream of {EVENTS + 1} events" if stream else "a whole answer"
        print(f"{calls.show(what, names=names)}\n  {bench.cpu_us(stream=stream):.1f} us of CPU")
    bench.check(num)
    bench.gateway.close()


# -- the whole process

PROMPT_BYTES, ANSWERS, CLIENTS = 1024, 2048, 4
SETTLE_S = 2.0  # more than a turn of any thread that writes
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE)


class FakeServer(asyncio.Protocol):
    """An OpenAI server that has read a request when its body is here."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        if end and len(body) >= length:
            self._read = b""
            is_ours = head.startswith(b"POST /v1/chat/completions")
            self._transport.write(_ANSWER if is_ours else b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


class FakeClient(asyncio.Protocol):
    """Sends one request after another, with prompts that have nothing in common."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self.num_left = 0
        self.is_done = asyncio.Event()
        self.last = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, number: int) -> None:
        self.num_left = number
        self.is_done.clear()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self.last = data
        self.num_left -= 1
        if self.num_left and data.startswith(b"HTTP/1.1 200"):
            self._transport.write(next(self._requests))
        else:
            self.is_done.set()


def _requests(key: str) -> Iterator[bytes]:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for number in itertools.count():
        content = f"{number:08d}: what is a penstock? ".ljust(PROMPT_BYTES, "x")
        prompt = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 64}
        body = msgspec.json.encode(prompt)
        yield head + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)


async def measure_process(directory: Path, *, names: bool, requests: int) -> None:
    from penstock.cli.gateway_process import Opened, serve
    from penstock.gateway.settings.gateway import GatewaySettings
    from penstock.tenancy.store import open_store

    loop, store = asyncio.get_running_loop(), f"sqlite:///{directory / 'penstock.db'}"
    with open_store(store) as opened:
        opened.add_tenant({"id": "bench", "limits": LIMITS})
        key = opened.create_key("bench").secret
    servers = [await loop.create_server(FakeServer, "127.0.0.1", 0) for _ in range(REPLICAS)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    models = {"m": {"replicas": urls, "dialect": "openai"}}
    settings = msgspec.convert({"port": 0, "store": store, "models": models}, GatewaySettings)
    unseen, calls, idle = Calls(), Calls(), Calls()
    counting = unseen

    def count(frame: FrameType, event: str, function: object) -> None:
        counting.count(frame, event, function)

    threading.setprofile(count)  # of threads that start from now on
    started: asyncio.Future[Opened] = loop.create_future()
    gateway = asyncio.ensure_future(serve(settings, store, started.set_result))
    port = (await started).listener.getsockname()[1]
    written = _requests(key)
    clients = [
        (await loop.create_connection(lambda: FakeClient(written), "127.0.0.1", port))[1] for _ in range(CLIENTS)
    ]

    async def run(number: int) -> None:
        for client in clients:
            client.send(number // CLIENTS)
        for client in clients:
            await client.is_done.wait()
            assert client.last.startswith(b"HTTP/1.1 200"), client.last

    await asyncio.sleep(1.0)  # the gateway finds out what its upstreams are
    await run(200)
    await asyncio.sleep(SETTLE_S)  # the logs' threads have written
    began, counting = time.monotonic(), calls
    with calls.counted():
        await run(requests)
        await asyncio.sleep(SETTLE_S)
    took_s, counting = time.monotonic() - began, idle
    with idle.counted():
        await asyncio.sleep(took_s)
    counting = unseen
    calls.python.subtract(idle.python)
    calls.c.subtract(idle.c)
    print(calls.show("a whole answer, all of the process", requests, names=names))
    gateway.cancel()
    await asyncio.gather(gateway, return_exceptions=True)
    for server in servers:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="each function, with its calls")
    parser.add_argument("--process", action="store_true", help="all of `penstock gateway`, with sockets and threads")
    asked = parser.parse_args()
    if not asked.process:
        asyncio.run(measure(names=asked.names))
        return
    import uvloop

    with tempfile.TemporaryDirectory() as directory:
        os.environ["PENSTOCK_HOME"] = directory
        logging.getLogger("penstock.gateway.request").setLevel(logging.INFO)
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):  # where the request log goes
            uvloop.run(measure_process(Path(directory), names=asked.names, requests=ANSWERS))


if __name__ == "__main__":
    main()
