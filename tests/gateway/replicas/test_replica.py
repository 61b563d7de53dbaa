"""What a replica is told beside a client's bytes."""

from penstock.gateway.replicas.replica import Replica
from penstock.http.upstream import Upstream
from penstock.tenancy.tenants import tenant_from


def test_a_penstock_replica_is_told_who_asks_by_what_weight_and_how_urgent_it_is() -> None:
    replica = Replica("http://127.0.0.1:1", model="m", upstream=Upstream("127.0.0.1", 1))
    tenant = tenant_from({"id": "acme", "weight": 2.5, "priority": "batch", "cache": "shared"})
    assert b"acme" not in replica.headers_for(tenant)
    replica.relays = True
    assert b"\r\nx-penstock-tenant: acme 2.5 2\r\n" in replica.headers_for(tenant)
