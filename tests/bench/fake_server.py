"""A fake OpenAI server: plain asyncio, one word per token, `/v1/models` and streamed completions and chats.

It can misbehave: every nth completion is refused, cut off, stalled, ended by an error, or comes without its usage.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from penstock.bench.client import Client, Recording, RequestFailed


class FakeServer:
    def __init__(
        self, token_s: float = 0.0, refuse_every: int = 0, status: int = 503, misdeed: str = "", slots: int = 1000
    ) -> None:
        self.token_s = token_s
        self.refuse_every = refuse_every  # every nth completion is answered with `status`
        self.status = status
        self.misdeed = misdeed  # cut, stall, error, no_usage; of all completions
        self.slots = asyncio.Semaphore(slots)  # how many it answers at a time; the others wait
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.written: list[list[float]] = []  # of each answer, when its words were
        self.running = self.most_running = 0
        self.url = ""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            writer.close()
            return
        self.heads.append(head)
        if "/v1/models" in head:
            self.write_models(writer)
        elif "/completions" in head:
            length = int(head.lower().partition("content-length:")[2].split()[0])
            await self.completion(json.loads(await reader.readexactly(length)), writer)
        else:
            write_json(writer, 404, {"error": {"message": "no such path"}})
        await writer.drain()
        writer.close()

    def write_models(self, writer: Writer) -> None:
        model = {"id": "fake", "object": "model", "max_model_len": 4096}
        write_json(writer, 200, {"object": "list", "data": [model]})

    async def completion(self, body: dict[str, Any], writer: Writer) -> None:
        self.bodies.append(body)
        if self.refuse_every and len(self.bodies) % self.refuse_every == 0:
            write_json(writer, self.status, {"error": {"message": "busy"}})
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        async with self.slots:
            await self.answer(body, writer)
        self.running -= 1

    async def answer(self, body: dict[str, Any], writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        times: list[float] = []
        self.written.append(times)
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.token_s)
            if index == 1 and self.misdeed == "cut":
                return
            if index == 1 and self.misdeed == "error":
                write_event(writer, {"error": {"message": "engine died"}})
                return
            if index == 1 and self.misdeed == "stall":
                await asyncio.Event().wait()
            word = {"delta": {"content": " word"}} if "messages" in body else {"text": " word"}
            write_event(writer, {"choices": [{"index": 0, **word}]})
            times.append(asyncio.get_running_loop().time())
            await writer.drain()
        usage = {"prompt_tokens": len(prompt_of(body).split()), "completion_tokens": body["max_tokens"]}
        if self.misdeed != "no_usage":
            write_event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


class MemoryClient(Client):
    """Asks a fake server of the same event loop without a socket, by that loop's clock: made for virtual time."""

    def __init__(self, fake: FakeServer) -> None:
        super().__init__("http://127.0.0.1:1")
        self._fake = fake
        self.clock = asyncio.get_running_loop().time  # type: ignore[assignment]

    async def _send(self, method: bytes, path: str, body: bytes, recording: Recording) -> Recording:
        recording.sent_s = self.clock()
        writer = _MemoryWriter(recording, self.clock)
        if path == "/v1/models":
            self._fake.write_models(writer)
        elif method == b"POST" and path.endswith("completions"):
            await self._fake.completion(json.loads(body), writer)
        else:
            write_json(writer, 404, {"error": {"message": "no such path"}})
        recording.ended_s = self.clock()
        if recording.status != 200:
            raise RequestFailed(f"http_{recording.status}", recording.body[:300].decode())
        return recording


class _MemoryWriter:
    """An answer's bytes, stamped as they are written; the head is the first of them."""

    def __init__(self, recording: Recording, clock: Callable[[], float]) -> None:
        self._recording = recording
        self._clock = clock

    def write(self, data: bytes) -> None:
        if not self._recording.status:
            head, _, data = data.partition(b"\r\n\r\n")
            self._recording.status = int(head.split()[1])
        if data:
            self._recording.times.append(self._clock())
            self._recording.parts.append(data)

    async def drain(self) -> None: ...


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


def prompt_of(body: dict[str, Any]) -> str:
    return body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[FakeServer]:
    server = await asyncio.start_server(fake.connection, "127.0.0.1", 0, backlog=1000)
    async with server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake


def write_event(writer: Writer, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def write_json(writer: Writer, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def main() -> None:
    """Options as words: `token_s=0.01 slots=4`."""
    options: dict[str, Any] = {name: json.loads(value) for name, value in (word.split("=") for word in sys.argv[1:])}
    async with serving(FakeServer(**options)) as fake:
        print(f"fake serves at {fake.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
