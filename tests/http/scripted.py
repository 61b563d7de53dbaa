"""Both ends of the wire, byte by byte: a client that sends what it is told, an upstream that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.waiting import GIVE_UP_S

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Stream:
    """One TCP connection, as a reader and a writer of raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes, gap_s: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(gap_s)

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> bytes:
        """The body of the next request, which has a length."""
        head = (await self.head()).lower()
        return await self.reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


class Client(Stream):
    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Client:
        sock = socket.create_connection(("127.0.0.1", port))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 20))

    async def post(self, body: bytes = b"{}", target: str = "/v1/chat/completions", headers: str = "") -> None:
        await self.send(
            f"POST {target} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
        )

    async def response(self, to_head: bool = False) -> Response:
        async with asyncio.timeout(GIVE_UP_S):
            lines = (await self.head()).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:-2])
            status = int(lines[0].split()[1])
            return Response(status, headers, b"" if to_head or status < 200 else await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if "transfer-encoding" not in headers:
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"
        return body

    async def ended(self) -> bool:
        """Whether the server has closed, with nothing more to say."""
        async with asyncio.timeout(GIVE_UP_S):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read(1) == b""
            return True


Script = Callable[[Stream], Awaitable[None]]


class ScriptedUpstream:
    """Runs its script for every connection; the connection closes when the script ends."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_accepted = 0
        self.num_lost = 0  # connections that the other side ended
        self.port = 0

    @classmethod
    async def start(cls, script: Script) -> ScriptedUpstream:
        self = cls(script)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_accepted += 1
        try:
            await self._script(Stream(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the last: uvloop, of a closed transport
            self.num_lost += 1
        except asyncio.CancelledError:
            pass  # the test is over; asyncio's streams would make a traceback of it
        finally:
            writer.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answering(stream: Stream) -> None:
    """Every request's body comes back."""
    while True:
        await stream.send(whole(await stream.request()))
