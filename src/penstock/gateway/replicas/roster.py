"""The replicas of a gateway: each followed for as long as the gateway runs, and all of a model together as its pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec.structs import replace

from penstock.core.errors import Overloaded, PenstockError, RequestAborted
from penstock.core.memory import trimming
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.replicas.kv_follower import KvFollower
from penstock.gateway.replicas.lora import AdapterKeeper, AdapterNotes
from penstock.gateway.replicas.replica import Follower, Replica
from penstock.gateway.replicas.zmq_events import IndexTeller, KvEventReader
from penstock.gateway.tokens.request_size import Pool
from penstock.health.speeds import Speeds
from penstock.http.forward import Outcome
from penstock.observe.redaction import redact
from penstock.router.learning import ObservedSpeeds
from penstock.router.prefix_index import PrefixIndex

_COUNTING_THREADS = 2  # for long prompts
_LONG_BYTES = 128 << 10  # of a body: what takes the time of reading it goes to a thread
_MAX_AWAY_BYTES = 256 << 20  # of bodies that threads are to read

T = TypeVar("T")

log = logging.getLogger(__name__)


class Roster:
    def __init__(
        self, replicas: Iterable[Replica], pool_names: Iterable[str], index: PrefixIndex, notes: AdapterNotes
    ) -> None:
        """`index` is told what the caches of those replicas hold that say so, `notes` what adapters they were given."""
        self.replicas: Mapping[str, Replica] = {replica.id: replica for replica in replicas}
        self._index = index
        self._notes = notes
        self._away_bytes = 0
        self._threads = ThreadPoolExecutor(_COUNTING_THREADS, thread_name_prefix="count")
        served_as = {replica.model: replica.served_as for replica in self.replicas.values()}
        names = {*served_as, *pool_names}
        self.pools = {name: Pool(self._threads, served_as.get(name, name)) for name in names}
        self._speeds = {name: Speeds() for name in names}
        self._observed = ObservedSpeeds()
        self._states: dict[str, ReplicaState] = {}
        self._followers: list[Follower] = []
        self._keepers: dict[str, AdapterKeeper] = {}  # of those that are to have adapters, or no longer
        self._kv_followers: dict[str, KvFollower] = {}
        self._kv_reader: KvEventReader | None = None

    def work(
        self, body: bytes, function: Callable[[], T], then: Callable[[T | None, PenstockError | None], None]
    ) -> None:
        """Something that takes as long as the body is large: at once for a short one, else in a thread. `then` is told
        what came of it, or what is wrong with the request."""
        if len(body) <= _LONG_BYTES:
            then(function(), None)
            return
        if self._away_bytes + len(body) > _MAX_AWAY_BYTES:
            raise Overloaded("too many large requests wait to be read", reason="reading", retry_after_s=1.0)
        self._away_bytes += len(body)

        def done(future: asyncio.Future[T]) -> None:
            self._away_bytes -= len(body)
            if future.cancelled():
                then(None, RequestAborted("the gateway is stopping"))
            elif (error := future.exception()) is None:
                then(future.result(), None)
            elif isinstance(error, PenstockError):
                then(None, error)
            else:
                log.error("a request could not be read", exc_info=error)
                then(None, PenstockError("this request could not be read"))

        asyncio.get_running_loop().run_in_executor(self._threads, trimming, function).add_done_callback(done)

    def follow(self, changed: Callable[[Replica], None]) -> None:
        adapted = [replica for replica in self.replicas.values() if replica.adapters or replica.unwanted]
        self._keepers = {replica.id: AdapterKeeper(replica, changed, self._notes) for replica in adapted}
        self._followers = [Follower(replica, changed) for replica in self.replicas.values()]
        published = [replica for replica in self.replicas.values() if replica.kv_events is not None]
        if published:
            self._kv_reader = KvEventReader(IndexTeller(self._index).told, namespace_of=published[0].salts.namespace_of)
        for replica in published:
            assert self._kv_reader is not None
            assert replica.kv_events is not None
            for source in replica.kv_events.sources(replica.id, replica.url):
                self._kv_reader.add(source)

    def seen(self, replica: Replica, now: float) -> ReplicaSnapshot:
        """What it said, what this gateway thinks of it, and how fast it is beside the others."""
        snapshot, speeds = replica.seen(now), self._speeds[replica.model]
        if snapshot.state is ReplicaState.OUT:
            speeds.forget(replica.id)
            return snapshot
        if not replica.relays:
            if has := replica.loaded | replica.listed:
                snapshot = replace(snapshot, adapters=has, warm_adapters=has)
            return self._with_observed(replica, snapshot)
        speed = speeds.seen(replica.id, replica.prefill_speed, snapshot.prefill_tokens_per_s)
        return replace(snapshot, prefill_tokens_per_s=speed)

    @property
    def own_replicas(self) -> frozenset[str]:
        """Penstock's: only they mark answers."""
        return frozenset(replica.id for replica in self.replicas.values() if replica.relays)

    def _with_observed(self, replica: Replica, snapshot: ReplicaSnapshot) -> ReplicaSnapshot:
        """What it does not say of its speed, its answers have shown."""
        observed = self._observed.of(replica.id)
        if observed is None:
            return snapshot
        prefill, decode = snapshot.prefill_tokens_per_s, snapshot.decode_tokens_per_s
        if replica.prefill_speed is None:
            prefill = observed.prefill
        if not snapshot.reports:
            decode = observed.decode * max(1, len(replica.in_flight))
        return replace(snapshot, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)

    def answered(self, replica: Replica, usage: TokenUsage, outcome: Outcome) -> None:
        """A stream came to its end: one that does not say how fast it is has shown it."""
        if not replica.relays and outcome.first_byte_s is not None:
            self._observed.learn(
                replica.id,
                usage.input_tokens - usage.cached_tokens,
                outcome.first_byte_s,
                usage.output_tokens,
                outcome.total_s - outcome.first_byte_s,
            )

    def replica_changed(self, replica: Replica) -> None:
        if replica.relays and replica.id not in self._kv_followers:  # a penstock replica
            self._kv_followers[replica.id] = KvFollower(replica.id, replica.upstream, replica.headers, self._index)
        self.pools[replica.model].replica_changed(replica)
        self._note(replica)
        if (keeper := self._keepers.get(replica.id)) is not None:
            keeper.look()

    def _note(self, replica: Replica) -> None:
        """In the log, when it comes, goes, or is told to go; not what passes in a moment."""
        state = replica.snapshot.state
        if state is ReplicaState.DEGRADED:
            state = ReplicaState.READY
        if state is not self._states.get(replica.id, ReplicaState.OUT):
            level = logging.WARNING if state is ReplicaState.OUT else logging.INFO
            log.log(level, "%s (%s) of %s is %s", redact(replica.id), replica.kind, replica.model, state)
        self._states[replica.id] = state

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        for keeper in self._keepers.values():
            keeper.close()
        for kv_follower in self._kv_followers.values():
            kv_follower.close()
        if self._kv_reader is not None:
            self._kv_reader.close()
        for replica in self.replicas.values():
            replica.upstream.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
