"""A fake OpenAI server: plain asyncio, one word per token, `/v1/models` and a streamed `/v1/completions`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class FakeServer:
    def __init__(self, token_s: float = 0.0, refuse_every: int = 0) -> None:
        self.token_s = token_s
        self.refuse_every = refuse_every  # every nth completion is answered 503
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.url = ""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "/v1/models" in head:
            write_json(writer, 200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            length = int(head.partition("content-length:")[2].split()[0])
            await self.completion(json.loads(await reader.readexactly(length)), writer)
        await writer.drain()
        writer.close()

    async def completion(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        if self.refuse_every and len(self.bodies) % self.refuse_every == 0:
            write_json(writer, 503, {"error": {"message": "busy"}})
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(self.token_s)
            write_event(writer, {"choices": [{"index": 0, "text": " word"}]})
            await writer.drain()
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        write_event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")
        self.running -= 1


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[FakeServer]:
    server = await asyncio.start_server(fake.connection, "127.0.0.1", 0)
    async with server:
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield fake


def write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def write_json(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def main() -> None:
    async with serving(FakeServer()) as fake:
        print(f"fake serves at {fake.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
