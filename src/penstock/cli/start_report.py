"""The report of a replica's start, told by its process to the one that started it: one message over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.settings import Settings
from penstock.engine.messages import Failed, Ready
from penstock.observe.redaction import redact

_start_decoder = msgspec.json.Decoder(Ready | Failed)


def serve_and_report(settings: Settings, descriptor: int) -> None:
    """Serve as a replica of somebody else, who is told instead of the terminal."""
    from penstock.cli.serve import serve

    with socket.socket(fileno=descriptor) as starter:

        def tell(message: Ready | Failed) -> None:
            with contextlib.suppress(OSError):  # nobody listens any more
                starter.sendall(msgspec.json.encode(message) + b"\n")

        try:
            serve(settings, on_ready=lambda info: tell(Ready(info)))
        except PenstockError as error:
            tell(Failed(error.code, redact(error.message)))
            sys.exit(1)


async def read_report(ours: socket.socket) -> Ready | Failed | None:
    """The report of the process at the other end about its start; None: it ended without one."""
    line = await read_line(ours)
    return _start_decoder.decode(line) if line else None


async def read_line(ours: socket.socket) -> bytes:
    """The first line that comes over a socket, which is closed; empty: none did."""
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        return await reader.readline()
    finally:
        writer.close()
