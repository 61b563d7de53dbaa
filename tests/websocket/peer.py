"""A client of WebSockets whose protocol is the `websockets` library's and whose bytes a test can see and send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from tests.waiting import GIVE_UP_S


class Peer:
    def __init__(self, protocol: ClientProtocol, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.protocol = protocol
        self.reader = reader
        self.writer = writer
        self.response: Response
        self._events: list[Any] = []

    @classmethod
    async def connect(
        cls,
        port: int,
        path: str = "/v1/chat/completions",
        *,
        protocols: list[str] | None = None,
        receive_buffer: int | None = None,
        **headers: str,
    ) -> Peer:
        """Returns a peer with its handshake's answer, whatever it is. A header `a_b` is `a-b`; an empty one is none."""
        sock = socket.create_connection(("127.0.0.1", port))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"), subprotocols=protocols)  # type: ignore[arg-type]
        self = cls(protocol, *await asyncio.open_connection(sock=sock, limit=1 << 20))
        request = protocol.connect()
        for name, value in headers.items():
            named = name.replace("_", "-")
            if named in request.headers:
                del request.headers[named]
            if value:
                request.headers[named] = value
        protocol.send_request(request)
        self.flush()
        self.response = await self._event()
        return self

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def error(self) -> dict[str, Any]:
        """The error of a handshake that was refused."""
        found: dict[str, Any] = json.loads(self.response.body or b"")["error"]
        return found

    def flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                self.writer.write(data)

    def send(self, message: object = None, **members: object) -> None:
        self.protocol.send_text(json.dumps(message or members).encode())
        self.flush()

    def ask(self, request_id: str, **members: object) -> None:
        self.send(type="request", id=request_id, body={"model": "m"}, **members)

    async def receive(self) -> dict[str, Any]:
        """The next message."""
        while True:
            event = await self._event()
            assert isinstance(event, Frame), event
            if event.opcode is Opcode.TEXT:
                found: dict[str, Any] = json.loads(event.data)
                return found
            assert event.opcode is Opcode.PING, event

    async def closed(self) -> tuple[int, str]:
        """Code and reason of the server's close frame, once the connection is over; 1006: there was none."""
        with contextlib.suppress(EOFError):
            while True:
                await self._event()
        await self.ended()
        said = self.protocol.close_rcvd
        return (said.code, said.reason) if said is not None else (1006, "")

    async def ended(self) -> None:
        """The server has closed the connection."""
        async with asyncio.timeout(GIVE_UP_S):
            with contextlib.suppress(ConnectionResetError):
                while await self.reader.read(1 << 16):
                    pass
        self.writer.close()

    async def _event(self) -> Any:
        async with asyncio.timeout(GIVE_UP_S):
            while not self._events:
                if self.protocol.handshake_exc is not None or self.protocol.close_rcvd is not None:
                    raise EOFError
                try:
                    data = await self.reader.read(1 << 16)
                except ConnectionResetError:
                    data = b""
                if not data:
                    self.protocol.receive_eof()
                    self._events += self.protocol.events_received()
                    if not self._events:
                        raise EOFError
                    break
                self.protocol.receive_data(data)
                self.flush()
                self._events += self.protocol.events_received()
            return self._events.pop(0)
