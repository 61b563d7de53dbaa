"""The replicas of a gateway: each followed for as long as the gateway runs, and all of a model together as its pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from penstock.gateway.kv_follower import KvFollower
from penstock.gateway.replicas import Follower, Replica
from penstock.gateway.sizes import Pool
from penstock.router.prefix_index import PrefixIndex

_COUNTING_THREADS = 2  # for long prompts


class Roster:
    def __init__(self, replicas: Iterable[Replica], pool_names: Iterable[str], index: PrefixIndex) -> None:
        """`index` is told what the caches of those replicas hold that say so."""
        self.replicas: Mapping[str, Replica] = {replica.id: replica for replica in replicas}
        self._index = index
        self._threads = ThreadPoolExecutor(_COUNTING_THREADS, thread_name_prefix="count")
        served_as = {replica.model: replica.served_as for replica in self.replicas.values()}
        names = {*served_as, *pool_names}
        self.pools = {name: Pool(self._threads, served_as.get(name, name)) for name in names}
        self._followers: list[Follower] = []
        self._kv_followers: dict[str, KvFollower] = {}

    def follow(self, changed: Callable[[Replica], None]) -> None:
        self._followers = [Follower(replica, changed) for replica in self.replicas.values()]

    def replica_changed(self, replica: Replica) -> None:
        if replica.relays and replica.id not in self._kv_followers:  # a penstock replica
            self._kv_followers[replica.id] = KvFollower(replica.id, replica.upstream, replica.headers, self._index)
        self.pools[replica.model].replica_changed(replica)

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        for kv_follower in self._kv_followers.values():
            kv_follower.close()
        for replica in self.replicas.values():
            replica.upstream.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
