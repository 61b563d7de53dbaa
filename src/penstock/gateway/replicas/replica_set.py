"""Membership: the replicas that a gateway knows, which come and go while it runs.

Everything that keeps something of a replica subscribes: it is told when one is added, has changed, or is removed, and
then forgets all of it. Belongs to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.gateway.replicas.replica import Replica


class Subscriber:
    """The three calls of a `ReplicaSet`, each of which may be left out."""

    def replica_added(self, replica: Replica) -> None: ...

    def replica_changed(self, replica: Replica) -> None:
        """A report, a probe or an answer has changed what is known of it."""

    def replica_removed(self, replica: Replica) -> None: ...


class ReplicaSet(Mapping[str, Replica]):
    def __init__(self) -> None:
        self.by_id: dict[str, Replica] = {}  # not to be changed: for who looks one up for every request
        self._subscribers: list[Subscriber] = []

    def __getitem__(self, replica_id: str) -> Replica:
        return self.by_id[replica_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id)

    def __len__(self) -> int:
        return len(self.by_id)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Calls reach subscribers in the order in which they came. A late one is told of those that are there."""
        self._subscribers.append(subscriber)
        for replica in list(self.by_id.values()):
            subscriber.replica_added(replica)

    def add(self, replica: Replica) -> None:
        assert replica.id not in self.by_id
        self.by_id[replica.id] = replica
        for subscriber in self._subscribers:
            subscriber.replica_added(replica)

    def remove(self, replica_id: str) -> Replica:
        """Takes a replica out of all routing at once. What it is working on, it may end."""
        replica = self.by_id.pop(replica_id)
        for subscriber in reversed(self._subscribers):
            subscriber.replica_removed(replica)
        return replica

    def changed(self, replica: Replica) -> None:
        if self.by_id.get(replica.id) is replica:  # one that was removed may still be heard of
            for subscriber in self._subscribers:
                subscriber.replica_changed(replica)
