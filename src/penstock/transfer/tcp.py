"""KV transfer over TCP: a port where other engines pull blocks, and connections to those that this one pulls from.

Every connection has two threads, one that reads and one that sends. The engine's thread hands them work and takes what
came of it; it never waits for a socket. A connection that is lost ends all its tickets, and the next one that is asked
for begins with a new handshake. Where none could be made, none is tried for a moment: who asks is told so at once.

Bytes of blocks follow their message, or a mover copies them from the memory of the engine that lends them: both sides
agree on one in the handshake. Then the message says where blocks lie, the puller copies them and says so (`Read`), and
they have landed only once the lender has answered that it held them until then (`Held`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import select
import socket
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from os import EFD_CLOEXEC, EFD_NONBLOCK, eventfd, eventfd_read, eventfd_write
from typing import NoReturn, assert_never

from msgspec.structs import astuple, replace

from penstock.core.errors import ConfigError
from penstock.core.hashing import BlockHash
from penstock.link.connection import Disconnected, close, shut_down, tune
from penstock.link.proof import Refused, prove
from penstock.transfer.messages import (
    MAGIC,
    PROTOCOL,
    Ask,
    Blocks,
    Credit,
    Drop,
    Ended,
    FromPuller,
    Held,
    Hello,
    Keep,
    Offer,
    Read,
    Refusal,
    Use,
    Welcome,
    Working,
    from_lender_decoder,
    from_puller_decoder,
)
from penstock.transfer.ports import (
    Asked,
    BlockMemory,
    Credited,
    Dropped,
    Event,
    Heard,
    Kept,
    Landed,
    Mover,
    PeerGone,
    RemoteMemory,
    Sent,
    Told,
    Unreachable,
)
from penstock.transfer.shared_memory import machine_identity
from penstock.transfer.wire import Wire

log = logging.getLogger("penstock.transfer")

_HANDSHAKE_S = 5.0
_SECRET = "gateway_secret"
_PART_BYTES = 8 << 20  # of blocks whose bytes follow a message, so that tickets take turns
_MAX_PEERS = 256
TCP = "tcp"  # the mover that is none: bytes follow their message
_RETRY_S = 2.0  # after a connection that could not be made
_FULL_S = 0.1  # between two tries to accept, where the process has too many files open


class TcpNetwork:
    """`Network` over TCP."""

    def __init__(
        self,
        memory: BlockMemory,
        epoch: str,
        secret: str,
        *,
        timeout_s: float,
        retry_s: float = _RETRY_S,
        movers: Sequence[Mover] = (),
        sends_bytes: bool = True,
    ) -> None:
        """`movers`: the best first; `sends_bytes`: where none of them works, bytes go over the connection."""
        self._memory = memory
        self.movers = {mover.name: mover for mover in movers}
        self.mover_names = [*self.movers, *([TCP] if sends_bytes else [])]
        self._epoch = epoch
        self._secret = secret.encode()
        self.timeout_s = timeout_s  # of silence
        self._retry_s = retry_s
        self._failed_s: dict[str, float] = {}  # addresses where no connection could be made, and when
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}  # by address
        self._by_ticket: dict[int, _Source] = {}
        self._takers: dict[int, _Taker] = {}
        self._num_peers = 0
        self.is_withdrawn = False
        self._listening: socket.socket | None = None

    @property
    def descriptor(self) -> int:
        """Readable while there is something to take."""
        return self._wake

    def listen(self, host: str, port: int) -> int:
        """The port where others pull. Raises ConfigError."""
        try:
            self._listening = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            told = f"cannot listen for KV transfer on {host} port {port}: {error.strerror}"
            raise ConfigError(told, param="kv_port") from None
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        if self._listening is not None:
            close(self._listening)
        with self._lock:
            wires: list[_Source | _Taker] = [*self._sources.values(), *self._takers.values()]
        for one in wires:
            one.hang_up()
        for mover in self.movers.values():
            mover.close()

    # -- what the engine's thread takes

    def put(self, event: Event) -> None:
        self._events.put(event)
        eventfd_write(self._wake, 1)

    def take(self) -> list[Event]:
        with contextlib.suppress(BlockingIOError):
            eventfd_read(self._wake)  # before the events: one that comes meanwhile is announced again
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def sources_by_mover(self) -> dict[str, int]:
        with self._lock:
            return dict(Counter(source.mover for source in self._sources.values() if source.mover))

    # -- to who has blocks

    def ask(self, address: str, ask: Ask) -> None:
        with self._lock:
            source = self._sources.get(address)
            if (source is None or source.is_lost) and not self._is_waiting(address):
                source = self._sources[address] = _Source(self, address)
            if source is not None:
                self._by_ticket[ask.ticket] = source
        if source is not None:
            source.ask(ask)
        else:
            self.put(Told(Ended(ask.ticket, f"{address} could not be reached a moment ago")))

    def _is_waiting(self, address: str) -> bool:
        return time.monotonic() - self._failed_s.get(address, float("-inf")) < self._retry_s

    def lost(self, source: _Source, address: str, *, was_connected: bool) -> None:
        """Nothing is asked of it any more."""
        now = time.monotonic()
        with self._lock:
            if self._sources.get(address) is source:
                del self._sources[address]
            self._failed_s = {each: at for each, at in self._failed_s.items() if now - at < self._retry_s}
            if not was_connected:
                self._failed_s[address] = now

    def land(self, ticket: int, block_ids: Sequence[int]) -> None:
        if (source := self._source(ticket)) is not None:
            source.land(ticket, list(block_ids))

    def drop(self, ticket: int) -> None:
        if (source := self._source(ticket)) is not None:
            source.drop(ticket)

    def keep(self, tickets: Sequence[int]) -> None:
        by_source: dict[_Source, list[int]] = {}
        for ticket in tickets:
            if (source := self._source(ticket)) is not None:
                by_source.setdefault(source, []).append(ticket)
        for source, its in by_source.items():
            source.say(Keep(its))

    def hang_up(self, ticket: int) -> None:
        if (source := self._source(ticket)) is not None:
            source.hang_up()

    def _source(self, ticket: int) -> _Source | None:
        with self._lock:
            return self._by_ticket.get(ticket)

    def over(self, ended: Ended) -> None:
        """A ticket has ended, and nobody writes for it."""
        with self._lock:
            if self._by_ticket.pop(ended.ticket, None) is None:
                return
        self.put(Told(ended))

    # -- to who pulls

    def send(self, peer: int, ticket: int, first: int, block_ids: Sequence[int]) -> None:
        if (taker := self._taker(peer)) is not None:
            taker.send(ticket, first, block_ids)

    def end(self, peer: int, ended: Ended) -> None:
        if (taker := self._taker(peer)) is not None:
            taker.end(ended)

    def working(self, peer: int, tickets: Sequence[int]) -> None:
        if (taker := self._taker(peer)) is not None:
            taker.working(list(tickets))

    def _taker(self, peer: int) -> _Taker | None:
        with self._lock:
            return self._takers.get(peer)

    def gone(self, peer: int) -> None:
        with self._lock:
            self._takers.pop(peer, None)
        self.put(PeerGone(peer))

    def withdraw(self) -> None:
        """Nobody pulls from here until `offer_again`: whoever has this engine's memory lets go of it."""
        with self._lock:
            self.is_withdrawn = True
            takers = [*self._takers.values()]
        for taker in takers:
            taker.hang_up()
        for mover in self.movers.values():
            mover.close()

    def offer_again(self) -> None:
        self.is_withdrawn = False

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                sock, (host, *_) = self._listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(_FULL_S)
                    continue
                if error.errno == errno.ECONNABORTED:
                    continue
                return  # it is closed
            with self._lock:
                if is_full := len(self._takers) >= _MAX_PEERS:
                    log.warning("a connection from %s is closed: there are %d", host, _MAX_PEERS)
                else:
                    self._num_peers += 1
                    self._takers[self._num_peers] = _Taker(self, self._num_peers, sock, host)
            if is_full:
                sock.close()

    # -- of both

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    @property
    def epoch(self) -> str:
        return self._epoch

    def max_blocks(self, mover: str) -> int:
        """That one message has."""
        part_bytes = _PART_BYTES if mover == TCP else self.movers[mover].message_bytes
        return max(1, part_bytes // self._memory.layout.block_bytes)

    def prove(self, sock: socket.socket, *, is_caller: bool) -> None:
        """Raises Refused, Disconnected, TimeoutError."""
        tune(sock, self.timeout_s)
        sock.settimeout(_HANDSHAKE_S)
        prove(sock, MAGIC, PROTOCOL, self._secret, _SECRET, is_caller=is_caller)


@dataclass
class _Ticket:
    """Blocks that are to come."""

    hashes: list[BlockHash]
    places: list[int] | None = None  # None: nowhere yet
    num_taken: int = 0  # they come in order, and are written once
    is_dropped: bool = False


class _Source:
    """An engine that this one pulls from. Any thread may call."""

    def __init__(self, network: TcpNetwork, address: str) -> None:
        self.is_lost = False
        self.mover = ""  # none yet
        self._reason = f"{address} is gone"  # why it is lost
        self._network = network
        self._address = address
        self._wire: Wire | None = None
        self._remote: RemoteMemory | None = None  # None: bytes follow their message
        self._copied: deque[tuple[Read, bool]] = deque()  # what the lender has not answered yet; whether it was wanted
        self._lock = threading.Lock()
        self._waiting: list[Ask | Credit | Drop | Keep] = []  # until the handshake is done
        self._tickets: dict[int, _Ticket] = {}
        threading.Thread(target=self._run, name=f"kv-pull {address}", daemon=True).start()

    def ask(self, ask: Ask) -> None:
        with self._lock:
            is_lost = self.is_lost
            if not is_lost:
                self._tickets[ask.ticket] = _Ticket(ask.hashes)
                self._say(ask)
        if is_lost:
            self._network.over(Ended(ask.ticket, self._reason))

    def land(self, ticket: int, block_ids: list[int]) -> None:
        with self._lock:
            if (its := self._tickets.get(ticket)) is not None:
                its.places = block_ids
                self._say(Credit(ticket, len(block_ids)))

    def drop(self, ticket: int) -> None:
        """The other side's `Ended`, which comes after all blocks that it has sent, is the end."""
        with self._lock:
            if (its := self._tickets.get(ticket)) is not None and not its.is_dropped:
                its.is_dropped = True
                self._say(Drop(ticket))

    def say(self, message: Keep) -> None:
        with self._lock:
            self._say(message)

    def _say(self, message: Ask | Credit | Drop | Keep) -> None:
        if self._wire is None:
            self._waiting.append(message)
        else:
            self._wire.send(message)

    def hang_up(self) -> None:
        with self._lock:
            self.is_lost = True
            wire = self._wire
        if wire is not None:
            wire.close()  # who reads tells the rest
        else:
            self._end_all("it did not answer in time")  # nobody reads yet

    def _end_all(self, reason: str) -> None:
        with self._lock:
            self.is_lost = True
            tickets, self._tickets = [*self._tickets], {}
            self._waiting = []
        for ticket in tickets:
            self._network.over(Ended(ticket, reason))

    def _run(self) -> None:
        reason = "the connection was lost"
        try:
            self._connect()
            self._read()
        except Refused as refused:
            reason = refused.reason
        except (OSError, Disconnected, UnicodeError) as error:  # the last: of a name that no host can have
            reason = str(error) or reason
        except Exception:
            log.exception("KV transfer from %s failed", self._address)
        log.warning("KV blocks cannot be pulled from %s: %s", self._address, reason)
        with self._lock:
            self.is_lost, self._reason = True, reason
            wire = self._wire
        if wire is not None:
            wire.dispose()
        if self._remote is not None:
            self._remote.close()
        self._network.lost(self, self._address, was_connected=wire is not None)
        self._end_all(reason)

    def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), _HANDSHAKE_S)
        try:
            self._network.prove(sock, is_caller=True)
            wire = Wire(sock, from_lender_decoder, timeout_s=self._network.timeout_s)
        except BaseException:
            sock.close()
            raise
        try:
            network = self._network
            wire.send(Hello(network.epoch, network.memory.layout, network.mover_names, machine_identity()))
            answer = wire.receive()
            if not isinstance(answer, Welcome):
                raise Refused(answer.reason if isinstance(answer, Refusal) else "it speaks out of turn", is_final=True)
            self._epoch = answer.epoch
            wire.send(Use(self._reach(answer.offers)))
            with self._lock:
                if self.is_lost:
                    raise Disconnected
                self._wire = wire
                for message in self._waiting:
                    wire.send(message)
                self._waiting = []
        except BaseException:
            wire.dispose()
            raise

    def _reach(self, offers: Sequence[Offer]) -> str:
        """The first mover that works. Raises Refused."""
        reasons = []
        for offer in offers:
            if offer.mover == TCP:
                break
            try:
                if zlib.crc32(offer.handle) != offer.checksum:
                    raise Unreachable("its memory was told with a wrong checksum")
                self._remote = self._network.movers[offer.mover].open(offer.handle)
                break
            except (KeyError, Unreachable) as error:
                reasons.append(f"{offer.mover} does not work: {error}")
        else:
            raise Refused("; ".join(reasons) or "it offers no mover", is_final=True)
        note = f" ({'; '.join(reasons)})" if reasons else ""
        log.info("KV blocks of %s come by %s%s", self._address, offer.mover, note)
        self.mover = offer.mover
        return offer.mover

    def _read(self) -> None:
        assert self._wire is not None
        wire, network = self._wire, self._network
        while True:
            message = wire.receive()
            match message:
                case Blocks():
                    self._take(wire, message)
                case Held():
                    self._land(message)
                case Working(tickets):
                    network.put(Heard(tickets))
                case Ended(ticket):
                    with self._lock:
                        is_known = self._tickets.pop(ticket, None) is not None
                    if is_known:
                        network.over(message)
                case _:
                    raise Disconnected

    def _take(self, wire: Wire, message: Blocks) -> None:
        """Blocks that nobody waits for, or for which there is no room, or that came before, or of another process than
        the one that was met are read and forgotten: what has landed is never written again. What does not verify ends
        the connection: nothing on it can be believed."""
        ticket, first, end = message.ticket, message.first, message.first + message.count
        memory = self._network.memory
        if not 0 < message.count <= self._network.max_blocks(self.mover):
            raise Refused("it sent what nobody can have asked for", is_final=True)
        with self._lock:
            its = self._tickets.get(ticket)
            places = its.places if its is not None and message.epoch == self._epoch else None
        wanted = None
        if its is not None and places is not None and end <= len(places) and first == its.num_taken:
            wanted = places[first:end]
            its.num_taken = end
        identity = message.identity(its.hashes) if its is not None else b""
        if self._remote is not None:
            self._copy(wire, self._remote, message, identity, wanted)
        elif wanted is None:
            wire.skip_bytes(message.count * memory.layout.block_bytes)
        else:
            with memory.writing(wanted) as staged:
                wire.receive_bytes(staged.views)
                if staged.checksum(identity) != message.checksum:
                    raise Refused("blocks came with a wrong checksum", is_final=True)
            self._network.put(Landed(ticket, first, message.count))

    def _copy(
        self, wire: Wire, remote: RemoteMemory, message: Blocks, identity: bytes, wanted: list[int] | None
    ) -> None:
        if wanted is not None:
            if len(message.places) != message.count or zlib.crc32(identity) != message.checksum:
                raise Refused("blocks were said to be others than those that were asked for", is_final=True)
            try:
                remote.copy(message.places, wanted)
            except Unreachable as error:
                raise Refused(str(error), is_final=False) from None
        said = Read(message.ticket, message.first, message.count)
        self._copied.append((said, wanted is not None))
        wire.send(said)

    def _land(self, held: Held) -> None:
        """Answers come in the order of what was said."""
        said, is_wanted = self._copied.popleft() if self._copied else (None, False)
        if said is None or astuple(said) != astuple(held):
            raise Refused("it answered what nobody said", is_final=True)
        if is_wanted:
            self._network.put(Landed(held.ticket, held.first, held.count))


class _Taker:
    """An engine that pulls from this one."""

    def __init__(self, network: TcpNetwork, peer: int, sock: socket.socket, host: str) -> None:
        self._network = network
        self._peer = peer
        self._host = host
        self._socket = sock
        self._wire: Wire | None = None
        self._mover = TCP
        self._hashes: dict[int, list[BlockHash]] = {}  # by ticket, until it ends
        self._lock = threading.Lock()
        self._unread: deque[Blocks] = deque()  # of memory that the other side copies from
        self._read_s = 0.0  # when it last said that it had, or had to begin
        self._ending: dict[int, Ended] = {}  # said once all of the ticket is read
        threading.Thread(target=self._run, name=f"kv-lend {host}", daemon=True).start()

    def working(self, tickets: list[int]) -> None:
        with self._lock:
            is_late = bool(self._unread) and time.monotonic() - self._read_s > self._network.timeout_s
        if is_late:
            log.warning("an engine at %s does not copy the KV blocks that it was told of", self._host)
            self.hang_up()
        elif self._wire is not None:
            self._wire.send(Working(tickets))

    def end(self, ended: Ended) -> None:
        """After all blocks of this ticket that are to be sent, or copied."""
        if self._wire is not None:
            self._wire.do(lambda: self._end(ended))

    def _end(self, ended: Ended) -> None:
        assert self._wire is not None
        with self._lock:
            if any(blocks.ticket == ended.ticket for blocks in self._unread):
                self._ending.setdefault(ended.ticket, ended)
                return
            self._hashes.pop(ended.ticket, None)
            self._wire.send(ended)

    def send(self, ticket: int, first: int, block_ids: Sequence[int]) -> None:
        if self._wire is None:
            return
        each = self._network.max_blocks(self._mover)
        for start in range(0, len(block_ids), each):
            part = list(block_ids[start : start + each])
            self._wire.do(lambda start=start, part=part: self._send(ticket, first + start, part))  # type: ignore[misc]

    def _send(self, ticket: int, first: int, block_ids: list[int]) -> None:
        assert self._wire is not None
        network, hashes = self._network, self._hashes.get(ticket, [])
        said = Blocks(network.epoch, ticket, first, len(block_ids))
        if self._mover == TCP:
            with network.memory.reading(block_ids) as staged:
                found = staged.checksum(said.identity(hashes))
                self._wire.send_now(replace(said, checksum=found), staged.views)
            network.put(Sent(self._peer, ticket, len(block_ids)))
            return
        said = replace(said, places=block_ids)
        said = replace(said, checksum=zlib.crc32(said.identity(hashes)))
        with self._lock:
            if not self._unread:
                self._read_s = time.monotonic()
            self._unread.append(said)
        self._wire.send_now(said)

    def _was_read(self, read: Read) -> None:
        """Blocks are read in the order in which they were told of."""
        assert self._wire is not None
        with self._lock:
            said = self._unread.popleft() if self._unread else None
            if said is None or (said.ticket, said.first, said.count) != astuple(read):
                raise Disconnected
            self._read_s = time.monotonic()
            self._wire.send(Held(*astuple(read)))  # before the end, whoever says it
            is_last = all(blocks.ticket != read.ticket for blocks in self._unread)
            ended = self._ending.pop(read.ticket, None) if is_last else None
        if ended is not None:
            self.end(ended)
        self._network.put(Sent(self._peer, read.ticket, read.count))

    def hang_up(self) -> None:
        shut_down(self._socket)  # who reads closes it

    def _run(self) -> None:
        network = self._network
        try:
            self._greet()
            self._read()
        except Refused as refused:
            log.warning("an engine at %s cannot pull KV blocks: %s", self._host, refused.reason)
        except (OSError, Disconnected):
            pass
        except Exception:
            log.exception("KV transfer to %s failed", self._host)
        finally:
            if self._wire is not None:
                self._wire.dispose()  # nothing is read of our memory any more
            else:
                self._socket.close()
            network.gone(self._peer)

    def _greet(self) -> None:
        network = self._network
        network.prove(self._socket, is_caller=False)
        wire = Wire(self._socket, from_puller_decoder, timeout_s=network.timeout_s)
        try:
            hello = wire.receive()
            if not isinstance(hello, Hello):
                raise Disconnected
            if differing := differences(network.memory.layout, hello.layout):
                self._refuse(wire, differing)
            if network.is_withdrawn:
                self._refuse(wire, "it is parked")
            wire.send(Welcome(network.epoch, self._offers(wire, hello)))
            use = wire.receive()
            if not isinstance(use, Use) or use.mover not in network.mover_names:
                raise Disconnected
            self._mover = use.mover
        except BaseException:
            wire.dispose()
            raise
        self._wire = wire

    def _offers(self, wire: Wire, hello: Hello) -> list[Offer]:
        """Movers that both sides have, in the other's order. Raises Refused."""
        network, offers = self._network, []
        is_near = hello.machine == machine_identity()
        for name in hello.movers:
            if name == TCP and TCP in network.mover_names:
                offers.append(Offer(TCP))
            elif (mover := network.movers.get(name)) is not None and (is_near or not mover.is_local):
                with contextlib.suppress(Unreachable):
                    handle = mover.offer()
                    offers.append(Offer(name, handle, zlib.crc32(handle)))
        if not offers:
            here, there = ", ".join(network.mover_names), ", ".join(hello.movers)
            where = "" if is_near else ", on two machines"
            self._refuse(wire, f"kv_mover is {here} here and {there} there{where}: no mover works for both")
        return offers

    @staticmethod
    def _refuse(wire: Wire, reason: str) -> NoReturn:
        wire.send(Refusal(reason))
        wire.finish()
        raise Refused(reason, is_final=True)

    def _read(self) -> None:
        assert self._wire is not None
        peer, network = self._peer, self._network
        while True:
            message: FromPuller = self._wire.receive()
            match message:
                case Ask(ticket, hashes):
                    self._hashes.setdefault(ticket, hashes)
                    network.put(Asked(peer, message))
                case Credit(ticket, blocks):
                    network.put(Credited(peer, ticket, blocks))
                case Drop(ticket):
                    network.put(Dropped(peer, ticket))
                case Keep(tickets):
                    network.put(Kept(peer, tickets))
                case Read():
                    self._was_read(message)
                case Hello() | Use():
                    raise Disconnected
                case _:
                    assert_never(message)


def differences(ours: object, theirs: object) -> str:
    """Fields of a layout that are not the same, by name; empty: none."""
    names = type(ours).__struct_fields__  # type: ignore[attr-defined]
    return "; ".join(
        f"{name} is {getattr(ours, name)} here and {getattr(theirs, name)} there"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
