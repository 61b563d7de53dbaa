"""The first rank's side: it starts the followers, agrees with them on the cache's size, tells them each step, and
notices when one is gone.
"""

from __future__ import annotations

import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import msgspec

from penstock.core.errors import EngineFailed, PenstockError, all_errors
from penstock.core.model_config import ModelConfig
from penstock.core.parallelism import Parallelism
from penstock.core.ranks import RankLost
from penstock.core.settings import EngineSettings
from penstock.runner.ranks.connection import Connection, Disconnected
from penstock.runner.ranks.join import JoinedRanks, Meeting, Place
from penstock.runner.ranks.messages import (
    Agreed,
    Alive,
    Chosen,
    FailedToStart,
    FromFollower,
    Lost,
    RankSpec,
    RunStep,
    Sized,
    Started,
    ToFollower,
)
from penstock.runner.size import EngineSize
from penstock.runner.step_inputs import StepInputs
from penstock.sched.plan import Sampled

log = logging.getLogger("penstock.runner")

OnLost = Callable[[RankLost], None]


class Follower:
    """Another rank, as the leader knows it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self.rank = rank
        self.process = process
        self._connection = connection

    def send(self, payload: bytes) -> None:
        try:
            self._connection.send_encoded(payload)
        except Disconnected:
            raise self.lost() from None

    def receive(self) -> FromFollower:
        """What it says while it starts."""
        try:
            message = self._connection.receive()
        except Disconnected:
            raise EngineFailed(str(self.lost())) from None
        if isinstance(message, FailedToStart):
            raise _error(message.code, f"rank {self.rank}: {message.message}")
        assert isinstance(message, Sized | Started)
        return message

    def next(self, timeout_s: float) -> Alive | Chosen:
        """What it says while it runs."""
        try:
            message = self._connection.receive(timeout_s)
        except Disconnected:
            raise self.lost() from None
        except TimeoutError:
            raise RankLost(self.rank, f"its process has not answered for {timeout_s:g} s") from None
        if isinstance(message, Lost):
            raise RankLost(message.rank, message.why)
        assert isinstance(message, Alive | Chosen)
        return message

    def lost(self) -> RankLost:
        """Its death, in words."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return RankLost(self.rank, "it closed its connection")
        if status < 0:
            return RankLost(self.rank, f"its process was killed by {signal.Signals(-status).name}")
        return RankLost(self.rank, f"its process ended with status {status}")


class Leader:
    """All ranks, for the one that has the scheduler. `ranks` is its own side of the collectives."""

    def __init__(self, place: Place, followers: Sequence[Follower], settings: EngineSettings) -> None:
        self.ranks: JoinedRanks = place.ranks
        self.stage = place.stage
        self.device = place.device
        self._chooser = place.parallelism.chooser
        self._followers = followers
        self._timeout_s = settings.rank_timeout_s  # how long a follower may be silent, or behind
        self._chosen: queue.SimpleQueue[list[Sampled] | RankLost] = queue.SimpleQueue()
        self._num_calls = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # adapters are read by a thread of their own

    def agree(self, own: EngineSize) -> EngineSize:
        """The size that all ranks have room for; they are told."""
        sizes = [_sized(own)]
        for follower in self._followers:
            message = follower.receive()
            assert isinstance(message, Sized)
            sizes.append(message)
        agreed = Sized(
            min(size.num_blocks for size in sizes),
            min(size.host_blocks for size in sizes),
            max(size.staging_blocks for size in sizes),
        )
        self.tell(Agreed(agreed))
        return with_size(own, agreed)

    def started(self) -> None:
        """Wait until every follower runs what it is sent."""
        for follower in self._followers:
            assert isinstance(follower.receive(), Started)

    def tell(self, message: ToFollower) -> None:
        payload = self._encoder.encode(message)
        with self._lock:
            self._num_calls += 1
            for follower in self._followers:
                follower.send(payload)

    def run(self, step: StepInputs, choices: bytes | None = None) -> None:
        """`choices`: for the rank that chooses the step's tokens; None: it is this one."""
        inputs = step.encode()
        if choices is None:
            self.tell(RunStep(inputs))
            return
        plain, choosing = self._encoder.encode(RunStep(inputs)), self._encoder.encode(RunStep(inputs, choices))
        with self._lock:
            self._num_calls += 1
            for follower in self._followers:
                follower.send(choosing if follower.rank == self._chooser else plain)

    def chosen(self) -> list[Sampled]:
        """The tokens of the oldest step whose tokens were not asked for yet."""
        found = self._chosen.get()
        if isinstance(found, RankLost):
            raise found
        return found

    def watch(self, on_lost: OnLost) -> None:
        """Listen to the followers, in threads. `on_lost` is called in one as soon as a follower's process has ended, is
        silent, or makes no progress."""
        for follower in self._followers:
            name = f"watch-rank-{follower.rank}"
            threading.Thread(target=self._watch, args=(follower, on_lost), name=name, daemon=True).start()

    def _watch(self, follower: Follower, on_lost: OnLost) -> None:
        made, told, since_s = -1, 0, monotonic()
        try:
            while True:
                message = follower.next(self._timeout_s)
                if isinstance(message, Chosen):
                    self._chosen.put(message.sampled)
                    continue
                now_made = message.num_calls
                if now_made != made or made >= told:  # it went on, or had nothing to do
                    made, told, since_s = now_made, self._num_calls, monotonic()
                elif monotonic() - since_s > self._timeout_s:
                    raise RankLost(follower.rank, f"it has hung in a step for {self._timeout_s:g} s")
        except RankLost as lost:
            first = self._first_lost(lost)
            self.ranks.give_up(first.rank)
            self._chosen.put(first)
            on_lost(first)

    def _first_lost(self, noticed: RankLost) -> RankLost:
        """A rank that was killed, where others have ended for want of it."""
        for follower in self._followers:
            status = follower.process.poll()
            if status is not None and status < 0:
                return follower.lost()
        return noticed


def start_followers(
    model: str | ModelConfig, config: ModelConfig, settings: EngineSettings, parallelism: Parallelism
) -> Leader:
    """Processes for all ranks but this one, which load their parts meanwhile. `model`: see `RankSpec`."""
    meeting = Meeting(settings, parallelism)
    followers = []
    for rank in range(1, parallelism.num_ranks):
        ours, theirs = socket.socketpair()
        ways = meeting.ways[rank]
        spec = RankSpec(rank, parallelism, theirs.fileno(), ways, meeting.address, model, settings)
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.engine_process.rank", msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *ways.descriptors],
        )
        theirs.close()
        followers.append(Follower(rank, process, Connection(ours, FromFollower)))
    return Leader(meeting.join(config), followers, settings)


def with_size(own: EngineSize, agreed: Sized) -> EngineSize:
    """A rank's own size, made as small as the others need it."""
    block_bytes = own.kv_bytes // own.num_blocks
    return replace(
        own,
        limits=own.limits.within(agreed.num_blocks),
        num_blocks=agreed.num_blocks,
        kv_bytes=agreed.num_blocks * block_bytes,
        host_blocks=agreed.host_blocks,
        staging_blocks=agreed.staging_blocks,
    )


def _sized(size: EngineSize) -> Sized:
    return Sized(size.num_blocks, size.host_blocks, size.staging_blocks)


def _error(code: str, message: str) -> PenstockError:
    kinds = {kind.code: kind for kind in all_errors()}
    return kinds.get(code, EngineFailed)(message)
