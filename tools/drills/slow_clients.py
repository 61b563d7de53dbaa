"""Clients that stop reading, clients that drip their requests, clients that leave: none may hold the others.

    python -m tools.drills.slow_clients [--clients 200] [--tokens 2000]

While hundreds of streams stand still unread, the gateway's and the replica's memory stays bounded, and those who read
are served as before. Who drips a request is cut off when its time is up. What nobody waits for any more is cancelled at
the replica within a second.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import uvloop
from tests.waiting import eventually
from tools.drills.call import Call, ask, begin, post
from tools.drills.stand import MODEL, Process, Stand, stand

REPLICA = ("--max-num-seqs", "512", "--max-open", "2048", "--chunk-tokens", "2048")
MAX_BYTES = 400 << 10  # per client that does not read: what may be unsent, one read more, and Python's own
HEAD_TIMEOUT_S = 10.0  # the gateway's, for a request's headers


@dataclass
class Report:
    num_clients: int
    before_ms: float  # a quick request's p95
    during_ms: float
    num_stuck: int = 0  # streams at the replica that are generated and not taken
    gateway_bytes: int = 0  # more than before, per client that does not read
    replica_bytes: int = 0
    dripping_s: float = 0.0  # until the last one that drips was cut off
    cancelled_s: float = 0.0  # until the replica works for nobody who left
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        is_bounded = max(self.gateway_bytes, self.replica_bytes) < MAX_BYTES
        is_quick = self.cancelled_s <= 1.0 and self.dripping_s <= HEAD_TIMEOUT_S + 1.0
        return is_bounded and is_quick and not self.wrong


def stream(tokens: int, number: int) -> bytes:
    body = {
        "model": MODEL,
        "prompt": f"number {number}",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 5,
    }
    return post("/v1/completions", body)


async def quick(port: int, count: int) -> float:
    """The p95 of short requests, one after another, in milliseconds."""
    times = []
    for number in range(count):
        body = {"model": MODEL, "prompt": f"quick {number}", "max_tokens": 4}
        call = await ask(port, post("/v1/completions", body))
        assert call.status == 200, call.body
        times.append(call.ended_s - call.asked_s)
        await asyncio.sleep(0.01)
    return 1000 * sorted(times)[int(0.95 * count)]


async def unread(port: int, count: int, tokens: int) -> list[Call]:
    """Streams whose clients read the first words and then no more."""
    calls = []
    for number in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        _, call = await loop.create_connection(partial(Call, stream(tokens, number)), sock=sock)
        calls.append(call)
    for call in calls:
        await call.at_event(1)
        call.transport.pause_reading()
    return calls


async def dripping(port: int, count: int) -> float:
    """Returns how long it takes until all are cut off that send a byte of their headers now and then."""

    async def drip() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ")
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(b"y")
            await asyncio.wait([ended], timeout=0.5)
        writer.close()

    began = monotonic()
    async with asyncio.timeout(60):
        await asyncio.gather(*(drip() for _ in range(count)), return_exceptions=True)
    return monotonic() - began


async def leaving(gateway: Process, replica: Process, count: int) -> float:
    """Returns how long the replica works on for clients that have left, all at once."""
    calls = [await begin(gateway.port, stream(2000, number)) for number in range(count)]
    await asyncio.gather(*(call.at_event(5) for call in calls))
    began = monotonic()
    for call in calls:
        call.leave()
    await asyncio.to_thread(eventually, replica.num_open, lambda count: count == 0)
    return monotonic() - began


async def drill(place: Stand, num_clients: int, tokens: int) -> Report:
    replica = place.replica(*REPLICA)
    gateway = place.gateway(replica)
    await leaving(gateway, replica, num_clients)  # so that everything is warm, memory too
    report = Report(num_clients, await quick(gateway.port, 100), 0.0)
    report.cancelled_s = await leaving(gateway, replica, num_clients)
    gateway_bytes, replica_bytes = gateway.memory_bytes, replica.memory_bytes
    calls = await unread(gateway.port, num_clients, tokens)
    drips = asyncio.create_task(dripping(gateway.port, num_clients))
    # All is generated, and nobody takes it.
    await asyncio.to_thread(
        eventually, lambda: replica.get("/v1/penstock/snapshot")["num_running"], lambda count: count == 0
    )
    report.num_stuck = replica.num_open()
    report.during_ms = await quick(gateway.port, 100)
    report.gateway_bytes = (gateway.memory_bytes - gateway_bytes) // num_clients
    report.replica_bytes = (replica.memory_bytes - replica_bytes) // num_clients
    report.dripping_s = await drips
    for call in calls:
        call.leave()
    await asyncio.to_thread(eventually, replica.num_open, lambda count: count == 0)
    report.wrong += place.complaints()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
        report = uvloop.run(drill(place, arguments.clients, arguments.tokens))
    print(f"{report.num_clients} clients that stop reading, as many that drip, as many that leave")
    print(f"  a quick request, p95          {report.before_ms:8.1f} ms before, {report.during_ms:.1f} ms meanwhile")
    print(f"  streams that stand still      {report.num_stuck:8}")
    print(f"  memory of one, at the gateway {report.gateway_bytes >> 10:8} KiB")
    print(f"  memory of one, at the replica {report.replica_bytes >> 10:8} KiB")
    print(f"  dripping headers cut off in   {report.dripping_s:8.1f} s")
    print(f"  cancelled at the replica in   {report.cancelled_s:8.2f} s")
    for what in report.wrong[:5]:
        print(f"    {what}")
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
