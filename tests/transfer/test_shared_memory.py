"""KV blocks copied from another engine's memory: who may map it, what is believed, what is left when either dies."""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.link.connection import Disconnected
from penstock.link.proof import Refused, prove
from penstock.transfer.descriptors import DescriptorServer, fetch_descriptors
from penstock.transfer.host_memory import Parts
from penstock.transfer.messages import (
    MAGIC,
    PROTOCOL,
    Ask,
    Blocks,
    Credit,
    Ended,
    Held,
    Hello,
    Offer,
    Read,
    Use,
    Welcome,
    from_lender_decoder,
    from_puller_decoder,
)
from penstock.transfer.ports import Asked, PeerGone, Sent, Unreachable
from penstock.transfer.shared_memory import MemoryFile, SharedMemoryMover, machine_identity
from penstock.transfer.wire import Wire
from tests.transfer.networks import Memory, Side, chain, linked, serve, shm_side, tcp_side
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.transfer")


def mapped() -> set[str]:
    """Caches that this process has mapped: those of earlier tests too, until somebody collects them."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:penstock-kv" in line}


# -- who gets the memory


def test_a_descriptor_goes_to_who_knows_the_secret_only() -> None:
    server = DescriptorServer(b"s", [os.memfd_create("handed")])
    (descriptor,) = fetch_descriptors(server.name, b"s")
    os.close(descriptor)
    with pytest.raises(Refused, match="another secret"):
        fetch_descriptors(server.name, b"other")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{server.name}")
        sock.sendall(b"garbage" * 40)
        sock.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(4096):
                assert data
    server.close()
    with pytest.raises(OSError, match="refused"):
        fetch_descriptors(server.name, b"s")


def test_who_has_the_memory_of_another_can_read_it_only() -> None:
    file = MemoryFile()
    file.allocate(100)[:5] = b"bytes"
    descriptor = file.lend(Parts([], [])).seal()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0)
    with pytest.raises(OSError, match=r"not permitted|Invalid"):
        os.ftruncate(descriptor, 0)
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        assert file.nonce in mapped[:]
    os.close(descriptor)


def mover_of(file: MemoryFile) -> SharedMemoryMover:
    memory = Memory(file=file)
    return SharedMemoryMover(memory, [file.lend(memory.parts)], "s")


def opened(change: Callable[[dict[str, Any]], None]) -> str:
    """Why memory that is told of like this cannot be reached."""
    lender, puller = mover_of(MemoryFile()), mover_of(MemoryFile())
    handle = msgspec.msgpack.decode(lender.offer())
    change(handle)
    before = mapped()
    with pytest.raises(Unreachable) as refused:
        puller.open(msgspec.msgpack.encode(handle))
    assert mapped() <= before
    lender.close()
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda told: told["files"][0].update(nonce=bytes(16)), "another process's"),
        (lambda told: told["files"][0].update(offsets=[1 << 40]), "smaller than it says"),
        (lambda told: told.update(num_blocks=1 << 50), "smaller than it says"),
        (lambda told: told["files"][0].update(offsets=[]), "other parts"),
        (lambda told: told["files"].append({"nonce": bytes(16), "offsets": []}), "other parts"),
        (lambda told: told.update(socket="penstock-kv-nobody"), "refused"),
        (lambda told: told.clear(), "missing"),
    ],
)
def test_memory_that_is_not_what_it_is_said_to_be_is_not_mapped(
    change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    assert reason in opened(change)


def test_memory_that_could_be_taken_away_is_not_mapped() -> None:
    """Whoever reads it then is killed."""
    file, descriptor = MemoryFile(), os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 22)
    server = DescriptorServer(b"s", [descriptor])
    handle = {"socket": server.name, "files": [{"nonce": bytes(16), "offsets": [0]}], "num_blocks": 1}
    with pytest.raises(Unreachable, match="taken away"):
        mover_of(file).open(msgspec.msgpack.encode(handle))
    server.close()


# -- which mover


def test_where_memory_cannot_be_mapped_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, secret: bytes) -> list[int]:
        raise OSError("no such socket in this container")

    monkeypatch.setattr("penstock.transfer.descriptors.fetch_descriptors", refuse)
    with linked(shm_side(sends_bytes=True), shm_side(sends_bytes=True)) as pair:
        pair.ask(1, chain(1))
        pair.puller.network.land(1, [5])
        pair.lender.network.end(serve(pair, 1, [2]), Ended(1))
        eventually(lambda: pair.puller.told(1))
        assert pair.puller.network.sources_by_mover() == {"tcp": 1}
        assert pair.puller.memory.content(5) == pair.lender.memory.content(2)
    with linked(shm_side(), shm_side(sends_bytes=True)) as pair:
        pair.ask(1, chain(1))
        told = eventually(lambda: pair.puller.told(1))
        assert told is not None
        assert told.ended.reason == "shm does not work: no such socket in this container"


def test_engines_without_a_mover_in_common_are_told_so() -> None:
    with linked(shm_side(), tcp_side()) as pair:
        pair.ask(1, chain(1))
        told = eventually(lambda: pair.puller.told(1))
        assert told is not None
        assert told.ended.reason == "kv_mover is tcp here and shm there: no mover works for both"


def test_an_engine_on_another_machine_is_not_offered_memory_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("here", "there"))
    monkeypatch.setattr("penstock.transfer.tcp.machine_identity", lambda: next(names))
    with linked(shm_side(), shm_side()) as pair:
        pair.ask(1, chain(1))
        told = eventually(lambda: pair.puller.told(1))
        assert told is not None
        assert "on two machines: no mover works for both" in told.ended.reason


# -- a lender that is not what it says


class Lender:
    """Greets one puller as an engine does, with memory of its own, and then does what the test says."""

    def __init__(self, script: Callable[[Lender], None]) -> None:
        file = MemoryFile()
        self.memory = Memory(file=file)
        self.memory.fill()
        self.mover = SharedMemoryMover(self.memory, [file.lend(self.memory.parts)], "s")
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
        handle = self.mover.offer()
        self.wire.send(Welcome("e", [Offer("shm", handle, zlib.crc32(handle))]))
        assert self.wire.receive() == Use("shm")
        self.ask = self.wire.receive()
        assert isinstance(self.ask, Ask)
        assert isinstance(self.wire.receive(), Credit)
        with contextlib.suppress(Disconnected):
            self._script(self)
        self.wire.finish()
        self.wire.dispose()

    def blocks(self, first: int, block_ids: list[int], **changes: object) -> None:
        said = Blocks("e", self.ask.ticket, first, len(block_ids), places=block_ids)
        said = msgspec.structs.replace(said, checksum=zlib.crc32(said.identity(self.ask.hashes)))
        self.wire.send(msgspec.structs.replace(said, **changes))

    def read(self) -> Read:
        found = self.wire.receive()
        assert isinstance(found, Read)
        return found

    def hold(self, read: Read, **changes: int) -> None:
        self.wire.send(msgspec.structs.replace(Held(read.ticket, read.first, read.count), **changes))

    def close(self) -> None:
        self._thread.join(60)
        self._listening.close()
        self.mover.close()


def pulled(script: Callable[[Lender], None], count: int = 3) -> tuple[Side, list[int]]:
    """The puller, and what has landed of blocks that go to 4, 5, …."""
    lender, puller = Lender(script), shm_side()
    puller.network.ask(lender.address, Ask(7, chain(count)))
    puller.network.land(7, list(range(4, 4 + count)))
    assert eventually(lambda: puller.told(7)) is not None
    lender.close()
    landed = puller.landed(7)
    for place in landed:
        assert puller.memory.content(4 + place) == lender.memory.content(1 + place)
    puller.network.close()
    return puller, landed


def honest(lender: Lender) -> None:
    lender.blocks(0, [1])
    lender.blocks(1, [2, 3])
    for _ in range(2):
        lender.hold(lender.read())
    lender.wire.send(Ended(7))


def test_an_honest_lender_is_believed() -> None:
    assert pulled(honest)[1] == [0, 1, 2]


def test_what_the_lender_did_not_hold_until_it_was_read_does_not_land() -> None:
    """It thought that the puller was gone, say, and wrote something else there."""

    def script(lender: Lender) -> None:
        lender.blocks(0, [1])
        lender.hold(lender.read())
        lender.blocks(1, [2])
        lender.read()

    assert pulled(script)[1] == [0]


@pytest.mark.parametrize("changes", [{"ticket": 8}, {"first": 1}, {"count": 2}])
def test_an_answer_to_something_else_is_not_believed(changes: dict[str, int]) -> None:
    def script(lender: Lender) -> None:
        lender.blocks(0, [1])
        lender.hold(lender.read(), **changes)
        lender.wire.send(Ended(7))

    assert pulled(script)[1] == []


def test_an_answer_that_nobody_asked_for_is_not_believed() -> None:
    assert pulled(lambda lender: lender.wire.send(Held(7, 0, 1)))[1] == []


@pytest.mark.parametrize(
    "changes",
    [{"places": [2]}, {"places": []}, {"places": [1, 1]}, {"places": [99]}, {"checksum": 0}],
    ids=["another", "none", "too many", "beyond its memory", "checksum"],
)
def test_blocks_that_are_said_to_lie_elsewhere_do_not_land(changes: dict[str, object]) -> None:
    def script(lender: Lender) -> None:
        lender.blocks(0, [1], **changes)
        lender.hold(lender.read())
        lender.wire.send(Ended(7))

    assert pulled(script)[1] == []


def test_blocks_that_nobody_wants_are_not_copied_and_said_to_be_read() -> None:
    def script(lender: Lender) -> None:
        lender.blocks(0, [1])
        lender.hold(lender.read())
        lender.blocks(0, [9])  # again
        lender.blocks(2, [3])  # out of order
        lender.blocks(1, [2], epoch="another process")
        for _ in range(3):
            lender.hold(lender.read())
        lender.wire.send(Ended(7))

    puller, landed = pulled(script)
    assert landed == [0]
    assert puller.memory.content(5) == puller.memory.content(6) == [-1] * 4


# -- a puller that is not what it says


@contextlib.contextmanager
def puller_of(lender: Side) -> Iterator[Wire]:
    """One that has asked for three blocks, and has room for them."""
    port = lender.network.listen("127.0.0.1", 0)
    sock = socket.create_connection(("127.0.0.1", port))
    prove(sock, MAGIC, PROTOCOL, b"s", "secret", is_caller=True)
    wire = Wire(sock, from_lender_decoder, timeout_s=30.0)
    wire.send(Hello("p", lender.memory.layout, ["shm"], machine_identity()))
    assert isinstance(wire.receive(), Welcome)
    for message in (Use("shm"), Ask(1, chain(3)), Credit(1, 3)):
        wire.send(message)
    try:
        yield wire
    finally:
        wire.dispose()
        lender.network.close()


def peer_of(lender: Side) -> int:
    (asked,) = eventually(lambda: lender.events(Asked), len)
    assert isinstance(asked, Asked)
    return asked.peer


def test_blocks_are_held_until_they_are_said_to_be_read_and_the_end_comes_after_that() -> None:
    lender = shm_side()
    with puller_of(lender) as wire:
        peer = peer_of(lender)
        lender.network.send(peer, 1, 0, [2, 3])
        lender.network.end(peer, Ended(1, "no more"))
        assert wire.receive().places == [2, 3]
        assert not lender.events(Sent)
        wire.send(Read(1, 0, 2))
        assert wire.receive() == Held(1, 0, 2)
        assert wire.receive() == Ended(1, "no more")
        assert eventually(lambda: lender.events(Sent), len) == [Sent(peer, 1, 2)]


@pytest.mark.parametrize("read", [Read(1, 0, 1), Read(2, 0, 2), Read(1, 1, 2)])
def test_a_puller_that_has_read_what_it_was_not_told_of_is_gone(read: Read) -> None:
    lender = shm_side()
    with puller_of(lender) as wire:
        peer = peer_of(lender)
        lender.network.send(peer, 1, 0, [2, 3])
        wire.receive()
        wire.send(read)
        assert eventually(lambda: lender.events(PeerGone), len) == [PeerGone(peer)]


def test_a_puller_that_lives_and_does_not_read_is_gone_and_its_blocks_are_free() -> None:
    lender = shm_side()
    lender.network.timeout_s = 0.2
    with puller_of(lender) as wire:
        peer = peer_of(lender)
        lender.network.send(peer, 1, 0, [2, 3])
        wire.receive()

        def gone() -> bool:
            wire.send(Credit(1, 3))  # it lives
            lender.network.working(peer, [1])  # as an engine says while it lends
            return bool(lender.events(PeerGone))

        eventually(gone)


# -- what is left when a process dies


def lend_and_wait(pipe: object) -> None:
    side = shm_side(epoch="lender")
    side.memory.fill()
    pipe.send(side.network.listen("127.0.0.1", 0))  # type: ignore[attr-defined]
    peer = peer_of(side)
    side.network.send(peer, 1, 0, [2, 3])
    eventually(lambda: side.num_sent(1), lambda count: count == 2)
    signal.pause()


def test_a_lender_that_is_killed_is_not_mapped_any_more() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=lend_and_wait, args=(theirs,), daemon=True)
    process.start()
    puller = shm_side()
    before = mapped()
    puller.network.ask(f"127.0.0.1:{ours.recv()}", Ask(1, chain(2)))
    puller.network.land(1, [7, 8])
    eventually(lambda: puller.landed(1), lambda landed: landed == [0, 1])
    assert len(mapped() - before) == 1
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: puller.told(1)) is not None
    assert mapped() <= before
    expected = Memory()
    expected.fill()
    assert [puller.memory.content(block) for block in (7, 8)] == [expected.content(block) for block in (2, 3)]
    puller.network.close()
    process.join()
