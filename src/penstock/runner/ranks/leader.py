"""The first rank's side: it starts the followers, agrees with them on the cache's size, tells them each step, and
notices when one is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Generic, Protocol, TypeVar

import msgspec
from torch._C._distributed_c10d import Store

from penstock.core.errors import ConfigError, EngineFailed, PenstockError, all_errors
from penstock.core.expert_load import LayerLoad
from penstock.core.model_config import ModelConfig
from penstock.core.nodes import Nodes, spread
from penstock.core.ranks import RankLost, RankReading, RankUsage
from penstock.core.settings import EngineSettings
from penstock.link.connection import Connection, Disconnected
from penstock.runner.kv_memory import RankCache
from penstock.runner.mapped_memory import RankPool
from penstock.runner.ranks.gathering import Gathered, Gathering, RemoteProcess
from penstock.runner.ranks.join import JoinedRanks, Place, device_of, here_key, join, make_store
from penstock.runner.ranks.messages import (
    AdapterRead,
    Agreed,
    Alive,
    CacheHandle,
    Chosen,
    FailedToStart,
    FromFollower,
    GroupIdentity,
    Lost,
    PoolHandle,
    RankSpec,
    RunStep,
    Scores,
    Sized,
    Started,
    ToFollower,
    Vectors,
    Woken,
    from_follower_decoder,
)
from penstock.runner.ranks.process import start_rank
from penstock.runner.ranks.rank_cache import map_pool, reach_cache, reach_pool
from penstock.runner.ranks.ways import close_descriptors, make_ways
from penstock.runner.size import EngineSize
from penstock.runner.step_inputs import StepInputs
from penstock.sched.plan import Sampled

log = logging.getLogger("penstock.runner")

_LOOPBACK = "127.0.0.1"
_CAUSE_S = 1.0  # what another rank notices is told within this time of what we see ourselves
_LOOK_S = 0.02
T = TypeVar("T")
OnLost = Callable[[RankLost], None]
OnReading = Callable[[RankReading], None]


class RankProcess(Protocol):
    """A rank's process, on this node or another."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float = ...) -> int: ...

    def kill(self) -> None: ...


class Follower:
    """Another rank, as the leader knows it."""

    def __init__(self, rank: int, process: RankProcess, connection: Connection, where: str = "") -> None:
        """`where`: its node, if there are several."""
        self.rank = rank
        self.where = where
        self.process = process
        self._connection = connection

    def send(self, payload: bytes) -> None:
        try:
            self._connection.send_encoded(payload)
        except Disconnected:
            raise self.lost() from None

    def receive(self) -> FromFollower:
        """The next message while it starts."""
        try:
            message = self._connection.receive()
        except Disconnected:
            raise EngineFailed(str(self.lost())) from None
        if isinstance(message, FailedToStart):
            raise _error(message.code, f"{self.name}: {message.message}")
        if isinstance(message, Lost):
            raise EngineFailed(f"{self.name}: {RankLost(message.rank, message.why)}")
        assert isinstance(message, Sized | Started)
        return message

    def next(self, timeout_s: float) -> Alive | Woken | Chosen | AdapterRead | Vectors | Scores | Lost:
        """The next message while it runs."""
        try:
            message: FromFollower = self._connection.receive(timeout_s)
        except Disconnected:
            raise self.lost() from None
        except TimeoutError:
            raise RankLost(self.rank, f"its process has not answered for {timeout_s:g} s", self.where) from None
        if isinstance(message, FailedToStart):
            raise RankLost(self.rank, message.message, self.where)
        assert not isinstance(message, Sized | Started)
        return message

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.where})" if self.where else f"rank {self.rank}"

    @property
    def has_ended(self) -> bool:
        is_node_gone = isinstance(self.process, RemoteProcess) and bool(self.process.node_gone)
        return is_node_gone or self.process.poll() is not None

    def end(self) -> None:
        self._connection.close()
        self.process.kill()

    def lost(self) -> RankLost:
        """Its death, in words."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            gone = self.process.node_gone if isinstance(self.process, RemoteProcess) else ""
            return RankLost(self.rank, f"its node {gone}" if gone else "it closed its connection", self.where)
        if status < 0:
            return RankLost(self.rank, f"its process was killed by {signal.Signals(-status).name}", self.where)
        return RankLost(self.rank, f"its process ended with status {status}", self.where)


class Answers(Generic[T]):
    """Answers of other ranks, in the order in which they come, for one that waits. A lost rank ends the wait."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | RankLost] = queue.SimpleQueue()

    def put(self, answer: T | RankLost) -> None:
        self._queue.put(answer)

    def next(self) -> T:
        found = self._queue.get()
        if isinstance(found, RankLost):
            raise found
        return found


class Leader:
    """All ranks, for the one that has the scheduler. `ranks` is its own side of the collectives."""

    def __init__(self, place: Place, followers: Sequence[Follower], settings: EngineSettings) -> None:
        self.ranks: JoinedRanks = place.ranks
        self.stage = place.stage
        self.device = place.device
        self._nodes = place.nodes
        self._chooser = place.parallelism.chooser
        self._followers = followers
        self._timeout_s = settings.rank_timeout_s  # how long a follower may be silent, or behind
        self._chosen = Answers[list[Sampled]]()
        self._vectors = Answers[list[bytes]]()
        self._scores = Answers[list[float]]()
        self._adapters = Answers[PenstockError | None]()
        self._woken = Answers[tuple[int, PoolHandle]]()
        self._pools: dict[int, RankPool] = {}  # caches of other ranks on GPUs that are mapped here
        self.expert_loads: dict[int, LayerLoad] = {}  # of other stages' layers, as they last said
        self._num_calls = 0
        self._word = os.urandom(16)  # for followers' memory
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # adapters are read by a thread of their own
        self._cause: RankLost | None = None  # the first loss that was seen here, and not told by another rank
        self._is_found = threading.Event()

    def agree(self, own: EngineSize, formats: str, placement: str = "") -> EngineSize:
        """The size that all ranks have room for; they are told."""
        sizes = [_sized(own, formats)]
        for follower in self._followers:
            message = follower.receive()
            assert isinstance(message, Sized)
            if follower.where and message.formats != formats:
                raise ConfigError(
                    f"{follower.name} would compute in {message.formats}, and rank 0 in {formats}: nodes that differ "
                    "need dtype and quant",
                    param="dtype",
                )
            if message.placement != placement:
                raise ConfigError(
                    f"{follower.name} has read other expert_counts than rank 0: nodes need the same file, and it must "
                    "not change while they start",
                    param="expert_counts",
                )
            sizes.append(message)
        agreed = Sized(
            min(size.num_blocks for size in sizes),
            min(size.host_blocks for size in sizes),
            max(size.staging_blocks for size in sizes),
        )
        self.tell(Agreed(agreed, self._word))
        return with_size(own, agreed)

    def started(self) -> tuple[tuple[str, ...], tuple[RankCache | RankPool, ...]]:
        """Wait until every follower runs what it is sent. UUIDs of GPUs that ranks of this node have, but its own; and
        the caches of its ranks, in their order, that this one can reach."""
        uuids: list[str] = []
        caches: list[RankCache | RankPool] = []
        for follower in self._followers:
            message = follower.receive()
            assert isinstance(message, Started)
            if self._nodes.node_of(follower.rank) == 0:
                uuids.append(message.device)
                if isinstance(message.cache, CacheHandle):
                    caches.append(reach_cache(message.cache, self._word))
                elif message.cache is not None:
                    pool = self._pools[follower.rank] = reach_pool(message.cache, self._word, self.device)
                    caches.append(pool)
        return tuple(uuid for uuid in uuids if uuid), tuple(caches)

    def release_caches(self) -> None:
        """Let go of other ranks' caches, before they are parked: what is mapped here is not given back."""
        for pool in self._pools.values():
            pool.unmap()

    def reach_caches(self) -> None:
        """Map them anew; waits until all those ranks are awake."""
        for _ in self._pools:
            rank, handle = self._woken.next()
            map_pool(self._pools[rank], handle, self._word)

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
        return self._chosen.next()

    def vectors(self) -> list[bytes]:
        """Vectors of the texts that the last stage of a pipeline was told to embed."""
        return self._vectors.next()

    def scores(self) -> list[float]:
        return self._scores.next()

    def adapter_errors(self) -> list[PenstockError]:
        """Reasons of followers that could not read the adapter of which they were told; waits for all of them."""
        return [error for _ in self._followers if (error := self._adapters.next()) is not None]

    def watch(
        self, on_lost: OnLost, on_reading: OnReading = lambda reading: None, usage: Callable[[], RankUsage] = RankUsage
    ) -> None:
        """Listen to the followers, in threads. `on_lost` is called in one as soon as a follower's process has ended, is
        silent, or makes no progress; `on_reading` whenever a rank has said how it stands. `usage`: this rank's own."""
        for follower in self._followers:
            args, name = (follower, on_lost, on_reading, usage), f"watch-rank-{follower.rank}"
            threading.Thread(target=self._watch, args=args, name=name, daemon=True).start()

    def close(self) -> None:
        """End all other ranks."""
        for follower in self._followers:
            follower.end()

    def _watch(
        self, follower: Follower, on_lost: OnLost, on_reading: OnReading, usage: Callable[[], RankUsage]
    ) -> None:
        made, told, since_s = (-1, 0), 0, monotonic()
        try:
            while True:
                message = follower.next(self._timeout_s)
                if not isinstance(message, Alive):
                    self._take(message, follower)
                    continue
                on_reading(RankReading(follower.rank, follower.where, message.usage))
                if follower is self._followers[0]:  # this rank's own goes with it
                    on_reading(RankReading(0, self._nodes.where(0), usage()))
                for layer, load in message.experts.items():
                    self.expert_loads[layer] = msgspec.structs.replace(load, first_rank=follower.rank)
                now_made = (message.num_calls, message.num_parts)
                if now_made != made or made[0] >= told:  # it went on, or had nothing to do
                    made, told, since_s = now_made, self._num_calls, monotonic()
                elif monotonic() - since_s > self._timeout_s:
                    why = f"it has hung in a step for {self._timeout_s:g} s"
                    raise RankLost(follower.rank, why, follower.where)
        except RankLost as lost:
            if self._cause is None and lost.rank == follower.rank:
                self._cause = lost
                self._is_found.set()
            first = self._first_lost(lost)
            self.ranks.give_up(first.rank)
            for answers in (self._chosen, self._vectors, self._scores, self._adapters, self._woken):
                answers.put(first)
            on_lost(first)

    def _take(self, message: Woken | Chosen | AdapterRead | Vectors | Scores | Lost, follower: Follower) -> None:
        match message:
            case Woken(handle):
                self._woken.put((follower.rank, handle))
            case Chosen(sampled):
                self._chosen.put(sampled)
            case Vectors(vectors):
                self._vectors.put(vectors)
            case Scores(scores):
                self._scores.put(scores)
            case AdapterRead(_, code, text):
                self._adapters.put(_error(code, f"{follower.name}: {text}") if code else None)
            case Lost(rank, why):
                self._is_found.wait(_CAUSE_S)
                raise self._cause or RankLost(rank, why, self._nodes.where(rank))

    def _first_lost(self, noticed: RankLost) -> RankLost:
        """A rank that was killed, where others have ended for want of it."""
        for follower in self._followers:
            status = follower.process.poll()
            if status is not None and status < 0:
                return follower.lost()
        return noticed


def start_followers(
    model: str | ModelConfig, config: ModelConfig, settings: EngineSettings, identity: GroupIdentity, nodes: Nodes
) -> Leader:
    """Processes for all ranks but this one, which load their parts meanwhile. Other nodes are waited for, and start
    those of their ranks. `model`: see `RankSpec`."""
    parallelism = identity.parallelism
    node_map = spread(parallelism, nodes.count)
    device = device_of(settings.device, 0, node_map.sizes[0]).type
    gathering = Gathering(nodes, node_map, identity, settings) if nodes.count > 1 else None
    store = make_store(settings, parallelism, node_map, gathering.host if gathering is not None else _LOOPBACK)
    gathered = Gathered(node_map, {}, {}, {})
    if gathering is not None:
        sent = replace(settings, device="cuda" if device == "cuda" else "cpu")
        gathered = gathering.gather(store.port if store is not None else 0, sent)
    node_map = gathered.nodes
    between = {sender: sock.detach() for sender, sock in gathered.links.items()}
    ways = make_ways(parallelism, node_map, 0, between, shares_memory=device == "cpu")
    address = f"{store.host}:{store.port}" if store is not None else ""
    followers = []
    for rank in node_map.ranks_of(0)[1:]:
        ours, theirs = socket.socketpair()
        spec = RankSpec(rank, parallelism, theirs.fileno(), ways[rank], address, node_map, model, settings)
        with theirs:
            process = start_rank(spec)
        followers.append(Follower(rank, process, Connection(ours, from_follower_decoder), node_map.where(rank)))
    close_descriptors(ways.values(), besides=ways[0].descriptors)
    for rank, sock in sorted(gathered.controls.items()):
        remote = RemoteProcess(rank, gathered.joined[node_map.node_of(rank)])
        followers.append(Follower(rank, remote, Connection(sock, from_follower_decoder), node_map.where(rank)))
    if store is not None:
        _wait_until_here(store, followers, settings)
    return Leader(join(settings, parallelism, node_map, 0, ways[0], store, config), followers, settings)


def _wait_until_here(store: Store, followers: Sequence[Follower], settings: EngineSettings) -> None:
    """Waits until all ranks are about to join: one that cannot says so, or has ended, which raises."""
    deadline_s = monotonic() + settings.node_timeout_s
    waiting = list(followers)
    while waiting := [each for each in waiting if not store.check([here_key(each.rank)])]:
        for follower in waiting:
            if follower.has_ended:
                follower.receive()  # raises what it has said
            if monotonic() > deadline_s:
                raise EngineFailed(f"{follower.name} did not start within {settings.node_timeout_s:g} s")
        time.sleep(_LOOK_S)


def with_size(own: EngineSize, agreed: Sized) -> EngineSize:
    """A rank's own size, made as small as the others need it."""
    return replace(
        own.with_blocks(agreed.num_blocks), host_blocks=agreed.host_blocks, staging_blocks=agreed.staging_blocks
    )


def _sized(size: EngineSize, formats: str) -> Sized:
    return Sized(size.num_blocks, size.host_blocks, size.staging_blocks, formats)


def _error(code: str, message: str) -> PenstockError:
    kinds = {kind.code: kind for kind in all_errors()}
    return kinds.get(code, EngineFailed)(message)
