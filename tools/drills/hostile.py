"""One tenant sends what would stop a server for everybody, and another must not notice.

    python -m tools.drills.hostile [--rounds 1] [--at-once 4]

Starts two replicas and a gateway, and sends the corpus of hostile requests (`tests/hostile.py`) as one tenant while
another chats. Every hostile request must be answered, none with a fault of the server's; every chat of the other tenant
is answered; the longest time that a server takes to answer `/health` stays within what it takes on a quiet day and a
quarter of a second; both replicas are in use at the end, and memory is near where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import uvloop
from tests.hostile import CORPUS
from tools.drills.call import ask, post
from tools.drills.stand import MODEL, Process, Stand, stand

CONTEXT = 8192
QUIET_S = 5.0
PING_EVERY_S = 0.02
MAX_PAUSE_S = 0.25  # beyond the longest of a quiet day: drills run on busy machines, tests count CPU time (50 ms)
MAX_GROWTH_BYTES = 512 << 20  # of one process
REFUSALS = {400, 404, 413, 422, 429, 431, 529}


@dataclass
class Watch:
    """The longest that each server took to answer, and what the bystander was answered."""

    pauses_s: dict[str, float] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    longest_chat_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(self.pauses_s.values(), default=0.0)

    def __str__(self) -> str:
        where = max(self.pauses_s, key=self.pauses_s.__getitem__, default="")
        return f"{self.longest_s * 1e3:6.0f} ms ({where})  chat {self.longest_chat_s * 1e3:6.0f} ms"


@asynccontextmanager
async def watching(servers: dict[str, Process], gateway: Process, key: str) -> AsyncIterator[Watch]:
    """A bystander chats and somebody asks every server how it is, until the block ends."""
    watch, is_over = Watch(), asyncio.Event()

    async def ping(name: str, port: int) -> None:
        while not is_over.is_set():
            began_s = monotonic()
            call = await ask(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert call.status == 200, f"{name}: /health says {call.status}"
            watch.pauses_s[name] = max(watch.pauses_s.get(name, 0.0), monotonic() - began_s)
            await asyncio.sleep(PING_EVERY_S)

    async def chat() -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        while not is_over.is_set():
            began_s = monotonic()
            call = await ask(gateway.port, post("/v1/chat/completions", body, key))
            watch.statuses[call.status] += 1
            watch.longest_chat_s = max(watch.longest_chat_s, monotonic() - began_s)
            await asyncio.sleep(PING_EVERY_S)

    tasks = [asyncio.create_task(ping(name, server.port)) for name, server in servers.items()]
    tasks.append(asyncio.create_task(chat()))
    try:
        yield watch
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


async def drill(place: Stand, rounds: int, at_once: int, only: str) -> list[str]:
    mallory, alice = place.tenant("mallory"), place.tenant("alice")
    replicas = [place.replica("--max-num-seqs", "8") for _ in range(2)]
    gateway = place.gateway(*replicas)
    servers = {"gateway": gateway, "replica 1": replicas[0], "replica 2": replicas[1]}
    async with watching(servers, gateway, alice) as quiet:
        await asyncio.sleep(QUIET_S)
    print(
        f"{'quiet':44} {'':>6} {quiet.longest_s * 1e3:8.0f} ms  chat {quiet.longest_chat_s * 1e3:6.0f} ms", flush=True
    )
    before = {name: server.memory_bytes for name, server in servers.items()}
    wrong = []
    for _ in range(rounds):
        for attack in (each for each in CORPUS if only in each.name):
            request = post(attack.path, attack.build(MODEL), mallory)  # before: this process has to look on
            async with watching(servers, gateway, alice) as watch:
                calls = await asyncio.gather(*(ask(gateway.port, request) for _ in range(at_once)))
            statuses = Counter(call.status for call in calls)
            said = "/".join(map(str, statuses))
            print(f"{attack.name:44} {said:>8} {watch}", flush=True)
            if odd := {status for status in statuses if status != 200 and status not in REFUSALS}:
                wrong.append(f"{attack.name}: answered with {sorted(odd)}")
            if watch.longest_s > quiet.longest_s + MAX_PAUSE_S:
                wrong.append(f"{attack.name}: a server stood still for {watch.longest_s:.2f} s")
            if set(watch.statuses) - {200}:
                wrong.append(f"{attack.name}: the bystander was answered {dict(watch.statuses)}")
    for name, server in servers.items():
        grown = server.memory_bytes - before[name]
        print(f"{name}: {before[name] >> 20} MiB before, {grown >> 20:+} MiB")
        if grown > MAX_GROWTH_BYTES:
            wrong.append(f"{name} has grown by {grown >> 20} MiB")
        if not (server.is_running and server.is_ready()):
            wrong.append(f"{name} is out")
    print(f"billed to the attacker: {place.usage('mallory')}")
    return wrong + place.complaints()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="", help="attacks whose names hold this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory), context=CONTEXT) as place:
        wrong = uvloop.run(drill(place, arguments.rounds, arguments.at_once, arguments.only))
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
