"""What a replica is told beside a client's bytes."""

import pytest

from penstock.gateway.replicas.replica import Follower, Replica
from penstock.http.call import Failure, FailureKind
from penstock.http.upstream import Upstream
from penstock.tenancy.tenants import tenant_from
from tests.clocks import ManualClock


def test_a_penstock_replica_is_told_who_asks_by_what_weight_and_how_urgent_it_is() -> None:
    replica = Replica("http://127.0.0.1:1", model="m", upstream=Upstream("127.0.0.1", 1))
    tenant = tenant_from({"id": "acme", "weight": 2.5, "priority": "batch", "cache": "shared"})
    assert b"acme" not in replica.headers_for(tenant)
    replica.relays = True
    assert b"\r\nx-penstock-tenant: acme 2.5 2\r\n" in replica.headers_for(tenant)


async def test_a_replica_is_tried_again_though_one_who_is_told_that_it_was_lost_fails() -> None:
    clock = ManualClock()
    upstream = Upstream("127.0.0.1", 1, clock=clock)
    told: list[Replica] = []

    def changed(replica: Replica) -> None:
        told.append(replica)
        if len(told) == 1:
            raise RuntimeError("a subscriber")

    follower = Follower(Replica("http://127.0.0.1:1", model="m", upstream=upstream), changed)
    try:
        assert upstream.num_open == 1
        with pytest.raises(RuntimeError, match="a subscriber"):
            follower.failed(Failure(FailureKind.REFUSED, "nobody listens"))
        assert upstream.num_open == 1
        clock.advance(0.25)
        assert upstream.num_open == 2
    finally:
        follower.close()
        upstream.close()
