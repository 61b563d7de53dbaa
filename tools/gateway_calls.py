"""Python calls and CPU time of one request at the gateway: `python -m tools.gateway_calls [--names]`.

The real `Gateway`, with a tenant and limits that nobody reaches, in front of four upstreams that answer at once and
without a socket. Calls are counted for one request, which does not depend on the machine; CPU time is the best of some
rounds. What the sockets, the parser and the logs' threads cost is left out: `penstock bench gateway` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
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
        _, _, received_by = prepared
        received = received_by(receiver)
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
        counts: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                code = frame.f_code
                counts[f"{code.co_filename.rpartition('penstock/')[2]}:{code.co_qualname}"] += 1

        exchange = self.exchange(0, stream=stream)
        sys.setprofile(count)
        try:
            self.run(exchange, stream=stream)
        finally:
            sys.setprofile(None)
        return counts

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
        counts = bench.calls(stream=stream)
        num += 51 + ROUNDS * REQUESTS
        what = f"a stream of {EVENTS + 1} events" if stream else "a whole answer"
        print(f"{what}: {sum(counts.values())} calls, {bench.cpu_us(stream=stream):.1f} us of CPU")
        if names:
            for name, count in counts.most_common():
                print(f"  {count:4d} {name}")
    bench.check(num)
    bench.gateway.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="each function, with its calls")
    asyncio.run(measure(names=parser.parse_args().names))


if __name__ == "__main__":
    main()
