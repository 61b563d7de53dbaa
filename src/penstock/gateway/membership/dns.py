"""Replicas by DNS, for fleets without an orchestrator: an address record, or a service record, is a replica.

    dns: [http://replicas.internal:8001]                 every A and AAAA record, at this port
    dns: [srv+http://_penstock._tcp.replicas.internal]   every SRV record, at the port that it names

A name that does not exist has no replicas. When no DNS server answers, what was known stays. Needs dnspython (the extra
`dns`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.gateway.membership.member import Member
from penstock.gateway.settings.gateway import DnsSettings, ModelSettings
from penstock.http import clock as clocks
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.observe.background import Worker, outliving

log = logging.getLogger(__name__)

_NAME = "DNS discovery"
_SRV = "srv+"


class Query(NamedTuple):
    scheme: str  # of the replicas' URLs
    name: str
    port: int | None  # None: service records name it

    @staticmethod
    def parse(entry: str) -> Query:
        """Raises ConfigError."""
        is_service = entry.startswith(_SRV)
        parts = urlsplit(entry.removeprefix(_SRV))
        try:
            port = parts.port
        except ValueError:
            port = 0
        is_right = parts.hostname and not parts.path.strip("/") and (port is None if is_service else port)
        if not is_right or parts.scheme not in (("http", "https") if is_service else ("http",)):
            raise ConfigError(f"'{entry}' is none of http://NAME:PORT, srv+http://NAME, srv+https://NAME", param="dns")
        return Query(parts.scheme, str(parts.hostname), None if is_service else port)


class DnsSource:
    """Looks every name up again and again, from `start` to `close`."""

    name = "dns"

    def __init__(self, settings: DnsSettings, clock: TimerClock = LOOP_CLOCK) -> None:
        self._settings = settings
        self._clock = clock
        self._wanted: set[Query] = set()
        self._known: dict[Query, frozenset[str]] = {}  # URLs
        self._silent: set[Query] = set()  # that no server answers, as was told
        self._resolver: Any = None
        self._task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self.changed: Callable[[], None] = lambda: None

    def members(self, pools: Mapping[str, ModelSettings]) -> Iterator[Member]:
        found = [(name, pool, Query.parse(entry)) for name, pool in pools.items() for entry in pool.dns]
        self._wanted = {query for _, _, query in found}
        for name, pool, query in found:
            for url in sorted(self._known.get(query, ())):
                yield Member(name, url, pool)
        if self._wanted and self._task is None:
            self._start()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        try:
            resolver = import_module("dns.asyncresolver").Resolver(configure=not self._settings.nameservers)
        except ImportError:
            raise ConfigError("discovery by DNS needs dnspython: pip install 'penstock[dns]'", param="dns") from None
        if self._settings.nameservers:
            resolver.nameservers = self._settings.nameservers
            resolver.port = self._settings.port
        resolver.lifetime = self._settings.timeout_s
        self._resolver = resolver
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._worker = Worker.of_task(_NAME, self._task)

    async def _run(self) -> None:
        while True:
            with outliving(_NAME):
                await self.look()
            await clocks.sleep(self._clock, self._settings.every_s)

    async def look(self) -> None:
        """Looks every name up once."""
        queries = list(self._wanted)
        found = await asyncio.gather(*map(self._resolve, queries))
        now = {query: urls for query, urls in zip(queries, found, strict=True) if urls is not None}
        now = {query: urls for query, urls in (self._known | now).items() if query in self._wanted}
        if now != self._known:
            self._known = now
            self.changed()

    async def _resolve(self, query: Query) -> frozenset[str] | None:
        """The URLs that a name stands for; None: nobody knows now."""
        kinds = ("SRV",) if query.port is None else ("A", "AAAA")
        found = await asyncio.gather(*(self._ask(query, kind) for kind in kinds))
        if any(urls is None for urls in found):
            return None
        return frozenset().union(*(urls for urls in found if urls is not None))

    async def _ask(self, query: Query, kind: str) -> frozenset[str] | None:
        errors = import_module("dns.exception")
        resolver = import_module("dns.resolver")
        try:
            answer = await self._resolver.resolve(query.name, kind, search=False)
        except (resolver.NXDOMAIN, resolver.NoAnswer):
            self._silent.discard(query)
            return frozenset()
        except errors.DNSException as error:
            if query not in self._silent:
                self._silent.add(query)
                log.warning("%s cannot be looked up, its replicas stay as they were: %s", query.name, error)
            return None
        self._silent.discard(query)
        return frozenset(_url(query, record) for record in answer)


def _url(query: Query, record: Any) -> str:
    if query.port is None:
        return f"{query.scheme}://{str(record.target).rstrip('.')}:{record.port}"
    address = f"[{record.address}]" if ":" in record.address else record.address
    return f"{query.scheme}://{address}:{query.port}"
