"""KV transfer over TCP among strangers, with a man in the middle, and with a peer that is not what it says: what lands
is right, and whoever waits is told."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from penstock.link.proof import prove
from penstock.transfer.messages import (
    MAGIC,
    PROTOCOL,
    Ask,
    Blocks,
    Credit,
    Ended,
    Hello,
    Offer,
    Use,
    Welcome,
    from_puller_decoder,
)
from penstock.transfer.ports import Asked, Event, PeerGone, Sent
from penstock.transfer.tcp import TcpNetwork
from penstock.transfer.wire import Wire
from tests.transfer.fakes import FakeMemory
from tests.transfer.networks import Memory, Side, chain, other_layout, tcp_side
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.transfer")


# -- the handshake


def told_of(puller: Side, address: str, ticket: int = 1) -> Ended:
    puller.network.ask(address, Ask(ticket, chain(1)))
    told = eventually(lambda: puller.told(ticket))
    assert told is not None
    return told.ended


@contextlib.contextmanager
def lending(side: Side) -> Iterator[str]:
    port = side.network.listen("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        side.network.close()


def test_engines_with_different_secrets_do_not_meet() -> None:
    with lending(tcp_side("one")) as address:
        puller = tcp_side("two")
        assert "another secret (gateway_secret)" in told_of(puller, address).reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("kernels", "other"),
        ("kv_dtype", "fp8"),
        ("block_size", 8),
        ("parallelism", "TP2"),
        ("scales", (0.5,)),
        ("block_bytes", 64),
    ],
)
def test_engines_whose_blocks_differ_are_told_in_which_field(field: str, value: object) -> None:
    with lending(tcp_side()) as address:
        puller = tcp_side(layout=other_layout(**{field: value}))
        reason = told_of(puller, address).reason
        assert reason.startswith(f"{field} is ")
        assert f"and {value} there" in reason


def test_another_protocol_is_refused_by_number() -> None:
    from penstock import __version__

    with lending(tcp_side()) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(struct.pack("<8sI32s32s", MAGIC, PROTOCOL + 1, __version__.encode(), b"r" * 32))
            sock.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 200, b"\xff" * 500, b""])
def test_a_stranger_that_speaks_garbage_is_shown_the_door(garbage: bytes) -> None:
    lender = tcp_side()
    with lending(lender) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(garbage)
            sock.settimeout(30)
            with contextlib.suppress(OSError):  # the lender may have hung up already
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
        eventually(lambda: lender.events(PeerGone), len)
        assert not lender.events(Asked)


def proven(address: str) -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)))
    prove(sock, MAGIC, PROTOCOL, b"s", "secret", is_caller=True)
    return sock


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("<I", 0xFFFFFFFF),  # of a length that no message has
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",  # no msgpack
        struct.pack("<I", 1) + b"\x90",  # no message
    ],
)
def test_one_that_knows_the_secret_and_speaks_garbage_is_gone_and_leaves_no_thread(message: bytes) -> None:
    lender = tcp_side()
    with lending(lender) as address:
        before = threading.active_count()
        with proven(address) as sock:
            sock.sendall(message)
            eventually(lambda: lender.events(PeerGone), len)
        eventually(threading.active_count, lambda count: count <= before)


@pytest.mark.parametrize("address", ["127.0.0.1:1", f"{'x' * 70}.invalid:9000", "no-such-host.invalid:9000"])
def test_nobody_there_is_told_and_for_a_moment_nobody_tries_again(address: str) -> None:
    puller = tcp_side(retry_s=1e9)
    assert told_of(puller, address).reason
    eventually(
        threading.enumerate, lambda all_: not any("kv-pull" in each.name and address in each.name for each in all_)
    )
    assert "a moment ago" in told_of(puller, address, 2).reason


# -- a lender that is not what it says


class Lender:
    """Greets one puller as an engine does, and then does what the test says."""

    def __init__(self, script: Callable[[Lender], None]) -> None:
        self.memory = Memory()
        self.memory.fill()
        self._script = script
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sock, _ = self._listening.accept()
        prove(sock, MAGIC, PROTOCOL, b"s", "secret", is_caller=False)
        self.wire = Wire(sock, from_puller_decoder, timeout_s=5.0)
        assert isinstance(self.wire.receive(), Hello)
        self.wire.send(Welcome("e", [Offer("tcp")]))
        assert isinstance(self.wire.receive(), Use)
        self.ask = self.wire.receive()
        assert isinstance(self.ask, Ask)
        assert isinstance(self.wire.receive(), Credit)
        self._script(self)
        self.wire.finish()
        self.wire.dispose()

    def blocks(self, first: int, block_ids: list[int], /, *, spoils: bool = False, **changes: object) -> None:
        """Send these; `changes`: in what is said of them after their checksum was made."""
        said = Blocks("e", self.ask.ticket, first, len(block_ids), 0)
        with self.memory.reading(block_ids) as staged:
            said = msgspec.structs.replace(said, checksum=staged.checksum(said.identity(self.ask.hashes)))
            sent = memoryview(bytearray(b"".join(staged.views)))
        said = msgspec.structs.replace(said, **changes)
        if spoils:
            sent[3] ^= 1
        self.wire.do(lambda: self.wire.send_now(said, [sent]))

    def end(self, ticket: int | None = None) -> None:
        self.wire.send(Ended(self.ask.ticket if ticket is None else ticket))

    def close(self) -> None:
        self._thread.join(60)
        self._listening.close()


def pulled(script: Callable[[Lender], None], count: int = 3) -> tuple[Side, list[int], Lender]:
    """The puller, what has landed of blocks that go to 4, 5, …, and the lender. Whatever is said to have landed is
    what the lender has."""
    lender, puller = Lender(script), tcp_side()
    puller.network.ask(lender.address, Ask(7, chain(count)))
    puller.network.land(7, list(range(4, 4 + count)))
    assert eventually(lambda: puller.told(7)) is not None
    lender.close()
    landed = puller.landed(7)
    for place in landed:
        assert puller.memory.content(4 + place) == lender.memory.content(1 + place)
    assert puller.memory.content(3) == puller.memory.content(4 + count) == [-1] * 4
    puller.network.close()
    return puller, landed, lender


def test_an_honest_lender_is_believed() -> None:
    _, landed, _ = pulled(lambda lender: (lender.blocks(0, [1]), lender.blocks(1, [2, 3]), lender.end()))
    assert landed == [0, 1, 2]


def test_blocks_whose_bytes_were_changed_do_not_land() -> None:
    _, landed, _ = pulled(lambda lender: (lender.blocks(0, [1]), lender.blocks(1, [2], spoils=True), lender.end()))
    assert landed == [0]


def test_blocks_that_come_again_changed_do_not_spoil_what_has_landed() -> None:
    """They are found in the cache by now."""
    puller, landed, lender = pulled(
        lambda lender: (lender.blocks(0, [1, 2]), lender.blocks(0, [1, 2], spoils=True), lender.end())
    )
    assert landed == [0, 1]
    assert puller.memory.content(4) == lender.memory.content(1)


def test_blocks_that_come_twice_land_once() -> None:
    _, landed, _ = pulled(lambda lender: [lender.blocks(0, [1]) for _ in range(3)] and lender.end())
    assert landed == [0]


def test_blocks_that_come_out_of_order_do_not_land_out_of_place() -> None:
    _, landed, _ = pulled(lambda lender: (lender.blocks(1, [2]), lender.blocks(0, [1]), lender.end()))
    assert landed == [0]


@pytest.mark.parametrize(
    "changes",
    [{"first": 0}, {"epoch": "another process"}, {"ticket": 8}, {"first": 1 << 40}, {"checksum": 0}],
    ids=lambda changes: next(iter(changes)),
)
def test_blocks_that_are_said_to_be_others_do_not_land(changes: dict[str, object]) -> None:
    """Their bytes are as they were sent: what they are is not."""
    _, landed, _ = pulled(lambda lender: (lender.blocks(1, [2], **changes), lender.end()))
    assert landed == []


def test_more_blocks_than_anybody_can_have_asked_for_end_the_connection() -> None:
    _, landed, _ = pulled(lambda lender: (lender.blocks(0, [1]), lender.blocks(1, [2], count=1 << 50), lender.end()))
    assert landed == [0]


def test_blocks_after_the_end_land_nowhere_and_an_end_of_somebody_else_is_ignored() -> None:
    _, landed, _ = pulled(
        lambda lender: (lender.end(99), lender.blocks(0, [1]), lender.end(), lender.blocks(1, [2]), lender.end())
    )
    assert landed == [0]


def test_a_lender_that_goes_in_the_middle_of_a_block_is_noticed() -> None:
    def script(lender: Lender) -> None:
        lender.blocks(0, [1])
        said = Blocks("e", lender.ask.ticket, 1, 2, 0)
        lender.wire.do(lambda: lender.wire.send_now(said, [memoryview(b"half")]))

    _, landed, _ = pulled(script)
    assert landed == [0]


@pytest.mark.parametrize(
    "end",
    [
        {"computed_tokens": -5},
        {"device_s": -1.0},
        {"kv_block_s": float("nan")},
    ],
    ids=lambda end: next(iter(end)),
)
def test_costs_that_nobody_can_have_are_not_believed(end: dict[str, float]) -> None:
    def script(lender: Lender) -> None:
        lender.wire.send(Ended(lender.ask.ticket, "", **end))  # type: ignore[arg-type]

    puller, _, _ = pulled(script)
    told = puller.told(7)
    assert told is not None
    assert told.ended.computed_tokens == told.ended.device_s == told.ended.kv_block_s == 0
    assert told.ended.reason


def test_a_lender_that_refuses_is_not_asked_again_on_that_connection() -> None:
    lender = tcp_side(layout=other_layout(model="other"))
    with lending(lender) as address:
        puller = tcp_side()
        assert "model" in told_of(puller, address, 1).reason
        assert "model" in told_of(puller, address, 2).reason
        eventually(lambda: lender.events(PeerGone), lambda gone: len(gone) == 2)


def test_a_greeting_out_of_turn_is_refused() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = listening.accept()
        prove(sock, MAGIC, PROTOCOL, b"s", "secret", is_caller=False)
        wire = Wire(sock, from_puller_decoder, timeout_s=5.0)
        wire.receive()
        wire.send(Ended(1))
        wire.finish()
        wire.dispose()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert told_of(tcp_side(), f"127.0.0.1:{listening.getsockname()[1]}").reason == "it speaks out of turn"
    thread.join(60)
    listening.close()


def test_a_puller_that_says_that_it_lives_and_does_not_read_is_gone_and_its_blocks_are_free() -> None:
    memory = FakeMemory(4, 1 << 18)  # 2 MiB each: more than sockets take in
    lender = TcpNetwork(memory, "e", "s", timeout_s=1.0)
    port, gone = lender.listen("127.0.0.1", 0), threading.Event()

    def puller() -> None:
        with proven(f"127.0.0.1:{port}") as sock:
            for message in (Hello("p", memory.layout, ["tcp"]), Use("tcp"), Ask(1, chain(40)), Credit(1, 40)):
                payload = msgspec.msgpack.encode(message)
                sock.sendall(struct.pack("<I", len(payload)) + payload)
            with contextlib.suppress(OSError):
                while not gone.wait(0.1):
                    sock.sendall(struct.pack("<I", 0))

    thread = threading.Thread(target=puller, daemon=True)
    thread.start()
    seen: list[Event] = []

    def events(kind: type) -> list[Event]:
        seen.extend(lender.take())
        return [event for event in seen if isinstance(event, kind)]

    (asked,) = eventually(lambda: events(Asked), len)
    assert isinstance(asked, Asked)
    lender.send(asked.peer, 1, 0, [0, 1, 2, 3] * 10)
    assert eventually(lambda: events(PeerGone), len) == [PeerGone(asked.peer)]
    assert sum(event.count for event in events(Sent) if isinstance(event, Sent)) < 40
    gone.set()
    thread.join(60)
    lender.close()
