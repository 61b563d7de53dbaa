"""Replicas by DNS: real queries to a fake server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import dns.rcode
import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.membership.dns import DnsSource, Query
from penstock.gateway.membership.factory import ReplicaFactory
from penstock.gateway.membership.membership import Membership
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.settings.gateway import DnsSettings, ModelSettings
from tests.clocks import ManualClock
from tests.gateway.membership.fake_dns import FakeDns, fake_dns
from tests.waiting import GIVE_UP_S, eventually_async

NAME, SERVICE = "replicas.internal", "_penstock._tcp.replicas.internal"


class Stand(NamedTuple):
    server: FakeDns
    source: DnsSource
    replicas: ReplicaSet
    clock: ManualClock

    async def until(self, *urls: str) -> None:
        """Looks again as soon as the last look is over, and waits until these are the replicas."""
        await eventually_async(lambda: self.clock.waits_s == [5.0])
        asked = self.server.num_asked
        self.clock.advance(5.0)
        await eventually_async(lambda: self.server.num_asked > asked)
        await eventually_async(lambda: sorted(self.replicas), lambda found: found == sorted(urls))


@contextlib.asynccontextmanager
async def looking(*entries: str) -> AsyncIterator[Stand]:
    async with fake_dns() as (server, port):
        clock, replicas = ManualClock(), ReplicaSet()
        source = DnsSource(DnsSettings(nameservers=["127.0.0.1"], port=port, timeout_s=GIVE_UP_S), clock)
        membership = Membership(replicas, ReplicaFactory(clock=clock))
        source.changed = membership.refresh
        membership.add_source(source)
        membership.configure({"m": ModelSettings(dns=list(entries))})
        await eventually_async(lambda: clock.waits_s == [5.0])
        yield Stand(server, source, replicas, clock)
        source.close()


async def test_every_address_record_is_a_replica() -> None:
    async with looking(f"http://{NAME}:8001") as stand:
        assert not stand.replicas
        stand.server.records[NAME, "A"] = ["10.0.0.1", "10.0.0.2"]
        await stand.until("http://10.0.0.1:8001", "http://10.0.0.2:8001")
        stand.server.records[NAME, "A"] = ["10.0.0.2"]
        stand.server.records[NAME, "AAAA"] = ["fd00::1"]
        await stand.until("http://10.0.0.2:8001", "http://[fd00::1]:8001")
        stand.server.records.clear()
        await stand.until()


async def test_a_service_record_names_the_port() -> None:
    async with looking(f"srv+http://{SERVICE}") as stand:
        stand.server.records[SERVICE, "SRV"] = ["0 1 9001 a.internal.", "0 1 9002 b.internal."]
        await stand.until("http://a.internal:9001", "http://b.internal:9002")


async def test_replicas_stay_while_the_server_fails(caplog: pytest.LogCaptureFixture) -> None:
    async with looking(f"http://{NAME}:8001") as stand:
        stand.server.records[NAME, "A"] = ["10.0.0.1"]
        await stand.until("http://10.0.0.1:8001")
        stand.server.rcode = dns.rcode.SERVFAIL
        for _ in range(3):
            await stand.until("http://10.0.0.1:8001")
        await eventually_async(lambda: "cannot be looked up" in caplog.text)
        assert caplog.text.count("cannot be looked up") == 1
        stand.server.rcode = dns.rcode.NOERROR
        stand.server.records[NAME, "A"] = ["10.0.0.3"]
        await stand.until("http://10.0.0.3:8001")


@pytest.mark.parametrize(
    "entry", [NAME, f"http://{NAME}", f"https://{NAME}:1", f"srv+http://{NAME}:80", f"http://{NAME}:x", "srv+ftp://a"]
)
def test_entries_that_name_nothing_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="is none of"):
        Query.parse(entry)
