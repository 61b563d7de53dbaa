"""A fake DNS server: real messages over UDP, answered from a table that a test changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class FakeDns(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}  # by name and kind
        self.rcode = dns.rcode.NOERROR  # of every answer; another: the server fails
        self.num_asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.num_asked += 1
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.RA
        question = asked.question[0]
        name, kind = str(question.name).rstrip("."), question.rdtype.name
        if self.rcode != dns.rcode.NOERROR:
            answer.set_rcode(self.rcode)
        elif found := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), address)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def fake_dns() -> AsyncIterator[tuple[FakeDns, int]]:
    """The server and its port."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(FakeDns, local_addr=("127.0.0.1", 0))
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()
