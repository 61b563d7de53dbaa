"""Keeps a gateway's replicas equal to what its sources name together.

A source says which members it has now; whenever that changes, `refresh` compares all of them with the `ReplicaSet`.
What is new is added, what is gone is removed, and what is to be reached in another way is made anew. Where two sources
name the same replica, the first one's settings count, and it drains if one of them says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from penstock.core.config import within
from penstock.core.errors import ConfigError
from penstock.gateway.membership.factory import ReplicaFactory
from penstock.gateway.membership.file import members_of
from penstock.gateway.membership.member import Member
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe.redaction import redact

log = logging.getLogger(__name__)


class Source(Protocol):
    """A place that says which replicas there are, besides the file."""

    name: str  # as operators see it

    def members(self, pools: Mapping[str, ModelSettings]) -> Iterable[Member]:
        """The members that it knows now. `pools`: the file's, by name."""


class Membership:
    def __init__(
        self, replicas: ReplicaSet, factory: ReplicaFactory, adapters: Mapping[str, set[str]] | None = None
    ) -> None:
        """`adapters`: what gateways have brought to replicas before, by replica."""
        self._replicas = replicas
        self._factory = factory
        self._adapters = adapters or {}
        self._sources: list[Source] = []
        self._pools: Mapping[str, ModelSettings] = {}
        self._members: dict[tuple[str, str], tuple[Member, Replica]] = {}
        self._refused: set[tuple[str, str]] = set()  # members that were complained of
        self.changed: Callable[[], None] = lambda: None  # called after every refresh that changed something

    def add_source(self, source: Source) -> None:
        self._sources.append(source)
        self.refresh()

    def configure(self, pools: Mapping[str, ModelSettings]) -> None:
        """Takes the pools of the file. Raises ConfigError, and has changed nothing then."""
        self._apply(pools, is_strict=True)
        self._pools = pools

    def refresh(self) -> None:
        """A source has changed."""
        self._apply(self._pools, is_strict=False)

    @property
    def pools(self) -> dict[str, ModelSettings]:
        """The pools that the file names or that have members, by name."""
        return {**{member.pool: member.settings for member, _ in self._members.values()}, **self._pools}

    def _apply(self, pools: Mapping[str, ModelSettings], *, is_strict: bool) -> None:
        wanted = self._wanted(pools)
        counts = Counter(url for _, url in wanted)
        kept = {key: had for key, had in self._members.items() if key in wanted and had[0].is_reached_as(wanted[key])}
        taken = {replica.id for _, replica in kept.values()}
        new: dict[tuple[str, str], tuple[Member, Replica]] = {}
        for key, member in wanted.items():
            if key not in kept:
                replica_id = member.url if counts[member.url] == 1 and member.url not in taken else member.long_id
                if (replica := self._make(member, replica_id, is_strict=is_strict)) is not None:
                    new[key] = member, replica
                    taken.add(replica_id)
        gone = [key for key in self._members if key not in kept]
        for key in gone:
            self._replicas.remove(self._members.pop(key)[1].id)
        for key, (member, replica) in new.items():
            self._members[key] = member, replica
            replica.is_draining, replica.fleet_state, replica.source = member.is_draining, member.state, member.source
            self._replicas.add(replica)
        for key, (had, replica) in kept.items():
            now = wanted[key]
            self._members[key] = now, replica
            replica.source = now.source
            if _changeable(had) != _changeable(now):
                replica.keep_in(now.state, is_draining=now.is_draining)
                replica.configure_adapters(now.settings.adapters)
                self._replicas.changed(replica)
        if new or gone:
            self.changed()

    def _wanted(self, pools: Mapping[str, ModelSettings]) -> dict[tuple[str, str], Member]:
        found = {member.key: member for member in members_of(pools)}
        for source in self._sources:
            for member in source.members(pools):
                known = found.get(member.key)
                if known is None:
                    found[member.key] = replace(member, source=source.name)
                elif member.is_draining and not known.is_draining:
                    found[member.key] = replace(known, is_draining=True, state=member.state)
        return found

    def _make(self, member: Member, replica_id: str, *, is_strict: bool) -> Replica | None:
        """None: its settings are wrong, and it is complained of once."""
        try:
            with within(f"models.{member.pool.replace('@', '.versions.')}."):
                replica = self._factory.make(member.pool, member.settings, member.url, replica_id)
        except ConfigError as error:
            if is_strict:
                raise
            if member.key not in self._refused:
                self._refused.add(member.key)
                log.error("%s is no replica of %s: %s", redact(member.url), member.pool, error.message)
            return None
        self._refused.discard(member.key)
        replica.unwanted = self._adapters.get(redact(replica_id), set()) - replica.adapters.keys()
        return replica


def _changeable(member: Member) -> tuple[object, ...]:
    """Settings that a replica takes while it runs."""
    return member.is_draining, member.state, member.settings.adapters
