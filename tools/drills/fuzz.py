"""Wrong requests by the thousand against a server that must stay polite.

    python -m tools.drills.fuzz [--attacks 20000] [--seed 1]

Starts a replica and a gateway and attacks both. Nothing may be answered with a 5xx or by silence, no log may hold a
traceback, nothing may stay open or in memory, and afterwards both must answer as if nothing had been.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import httptools
import uvloop
from tools.drills.attacks import Attack, body_attacks, wire_attacks

_PATIENCE_S = 60.0  # for an answer that must come
_SILENCE_S = 0.15  # after which a request that is none is taken to be unanswered, if the server answers others
_GAP_S = 0.001
_WARM_UP = 500  # attacks, after which a process has what it keeps: caches, and the allocator's arenas
MAX_GROWTH_BYTES = 256 << 20  # of a process under attack; a leak of large bodies is gigabytes
_MAX_AT_ONCE = 40
_OVERLOADED = 529  # Anthropic's 429: some ask for a great deal
_FROM_UVICORN = b"Invalid HTTP request received."  # a replica's, to what is not HTTP


class Fuzz:
    """The outcome of the attacks so far."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    async def run(self, attacks: Iterable[Attack]) -> None:
        left = iter(attacks)

        async def one_after_another() -> None:
            for attack in left:
                with contextlib.suppress(OSError):  # it may cut us off
                    await self._attack(attack)

        await asyncio.gather(*(one_after_another() for _ in range(_MAX_AT_ONCE)))

    async def _attack(self, attack: Attack) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        answers = _Answers()
        try:
            size = max(1, -(-len(attack.sent) // attack.num_pieces))
            for at in range(0, len(attack.sent), size):
                if writer.transport.is_closing():  # it has answered, and wants no more
                    break
                writer.write(attack.sent[at : at + size])
                await asyncio.wait_for(writer.drain(), _PATIENCE_S)
                if attack.num_pieces > 1:
                    await asyncio.sleep(_GAP_S)  # so that they come in reads of their own
            if not attack.is_whole and len(attack.sent) % 4 == 0 and not writer.transport.is_closing():
                writer.write_eof()  # says no more, and listens
            if not attack.is_whole and len(attack.sent) % 4 == 1:
                return  # leaves at once
            is_over = await self._read(reader, answers, _PATIENCE_S if attack.is_whole else _SILENCE_S)
            if not (attack.is_whole or is_over or answers.num_bytes):
                await self._knock()
                is_over = await self._read(reader, answers, _SILENCE_S)
        except TimeoutError:
            self.faults.append(f"it stopped reading: {attack.name}")
            return
        finally:
            writer.transport.abort()
        self.statuses.update(answers.statuses)
        self.faults += [f"{what}: {attack.name}" for what in answers.faults]
        if attack.is_whole and not answers.num_complete:
            self.faults.append(f"{'no answer' if is_over else 'silence'}: {attack.name}")

    async def _knock(self) -> None:
        """Returns when the server had its turn: on a busy machine silence alone says nothing."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(reader.read(1), _PATIENCE_S)
        writer.transport.abort()

    @staticmethod
    async def _read(reader: asyncio.StreamReader, answers: _Answers, patience_s: float) -> bool:
        """Whether the server closed. An answer that comes in time buys no more than a little patience for the next."""
        while True:
            try:
                data = await asyncio.wait_for(reader.read(1 << 16), patience_s)
            except TimeoutError:
                return False
            if not data:
                return True
            answers.feed(data)
            if answers.num_complete:
                patience_s = _SILENCE_S / 10
            if answers.num_bytes > 1 << 20:
                return False


class _Answers:
    """A parser that complains: of answers that are no HTTP, of 5xx, of errors that are not ours."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_json = False
        self.statuses: list[int] = []
        self.num_complete = 0
        self.num_bytes = 0
        self.faults: list[str] = []

    def feed(self, data: bytes) -> None:
        self.num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.faults.append(f"an answer that is no HTTP ({error}, {data[:200]!r})")
            self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._parts = []
        self._is_json = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_json |= name.lower() == b"content-type" and value == b"application/json"

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        status, body = self.statuses[-1], b"".join(self._parts)
        if status == 100:
            return
        self.num_complete += 1
        if status >= 500 and status != _OVERLOADED:
            self.faults.append(f"status {status} {body[:300]!r}")
        elif status >= 400 and body and not self._is_error(body):
            self.faults.append(f"status {status} without an error in it {body[:300]!r}")

    def _is_error(self, body: bytes) -> bool:
        if body == _FROM_UVICORN:
            return True
        try:
            error = json.loads(body)["error"]
            return self._is_json and isinstance(error["message"], str) and isinstance(error["type"], str)
        except (ValueError, KeyError, TypeError):
            return False


def attacks(model: str, seed: int, count: int) -> Iterable[Attack]:
    rng = random.Random(seed)
    return chain(body_attacks(model, rng, count // 2), wire_attacks(model, rng, count - count // 2))


def fuzz(host: str, port: int, model: str, *, seed: int, count: int) -> Fuzz:
    found = Fuzz(host, port)
    uvloop.run(found.run(attacks(model, seed, count)))
    return found


def main() -> None:
    from tests.waiting import eventually
    from tools.drills.stand import MODEL, stand

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
        replica = place.replica()
        gateway = place.gateway(replica)
        for name, process in (("gateway", gateway), ("replica", replica)):
            fuzz("127.0.0.1", process.port, MODEL, seed=0, count=_WARM_UP)
            before_bytes = process.memory_bytes
            found = fuzz("127.0.0.1", process.port, MODEL, seed=arguments.seed, count=arguments.attacks)
            eventually(replica.num_open, lambda count: count == 0)
            grown_bytes = process.memory_bytes - before_bytes
            if grown_bytes > MAX_GROWTH_BYTES:
                found.faults.append(f"it has {grown_bytes >> 20} MiB more than before")
            print(
                f"{name}: {dict(sorted(found.statuses.items()))}, {grown_bytes >> 20} MiB more, "
                f"{len(found.faults)} faults",
                flush=True,
            )
            faults += found.faults + process.complaints()
    print("\n".join(fault[:400] for fault in faults[:50]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
