"""Who is a gateway."""

import pytest

from penstock.api import relay
from penstock.api.asgi import Request
from penstock.core.errors import InvalidRequest, PermissionDenied, Unauthenticated
from penstock.core.request import Priority
from penstock.server.gateway_headers import GatewayTrust


def request(client: str | None, path: str = "/", **headers: str) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    peer = (client, 1) if client else None
    return Request({"method": "POST", "path": path, "headers": raw, "client": peer}, receive)


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", None])
def test_without_a_secret_who_is_on_this_machine_is_one(client: str | None) -> None:
    for secret in (None, ""):
        GatewayTrust(secret).check(request(client))


@pytest.mark.parametrize("client", ["10.0.0.1", "0.0.0.0", "2001:db8::1", "::ffff:10.0.0.1"])
def test_without_a_secret_nobody_else_is(client: str) -> None:
    with pytest.raises(PermissionDenied):
        GatewayTrust(None).check(request(client))
    plain = GatewayTrust(None).read(request(client), b"{}")
    assert (plain.body, plain.is_relayed, plain.resume) == (b"{}", False, None)


def test_with_a_secret_it_alone_counts() -> None:
    trust = GatewayTrust("s")
    trust.check(request("10.0.0.1", x_penstock_secret="s"))
    for headers in ({}, {"x_penstock_secret": ""}, {"x_penstock_secret": "S"}):
        with pytest.raises(PermissionDenied):
            trust.check(request("127.0.0.1", **headers))


def test_a_gateway_says_who_asks_by_what_weight_and_how_urgent_it_may_be() -> None:
    trust = GatewayTrust(None)
    named = trust.read(request("127.0.0.1", x_penstock_tenant="acme 2.5 2", x_penstock_namespace=""), b"{}")
    assert named.tenancy == relay.Tenancy("acme", 2.5, Priority.LOW)
    assert trust.read(request("127.0.0.1", x_penstock_namespace="old"), b"{}").tenancy == relay.Tenancy("old")
    with pytest.raises(PermissionDenied):
        trust.read(request("10.0.0.1", x_penstock_tenant="acme 2.5 2"), b"{}")


@pytest.mark.parametrize(
    "value", ["", "acme", "acme 0 1", "acme -1 1", "acme nan 1", "acme inf 1", "acme 1 3", "a b 1 1"]
)
def test_what_is_no_tenant_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-penstock-tenant"):
        GatewayTrust(None).read(request("127.0.0.1", x_penstock_tenant=value), b"{}")


@pytest.mark.parametrize("priority", Priority)
@pytest.mark.parametrize("weight", [0.01, 1.0, 2.5, 1000.0])
def test_what_a_gateway_writes_is_what_a_replica_reads(weight: float, priority: Priority) -> None:
    tenancy = relay.Tenancy("acme", weight, priority)
    assert relay.read_tenant(relay.tenant_value(tenancy).decode()) == tenancy


def test_a_request_may_be_less_urgent_than_its_tenant_but_not_more() -> None:
    standard = relay.Tenancy("acme", 1.0, Priority.NORMAL)
    assert [standard.priority_of(asked) for asked in (None, *Priority)] == [1, 1, 1, 2]
    direct = relay.Tenancy()
    assert [direct.priority_of(asked) for asked in (None, *Priority)] == [1, 0, 1, 2]


def test_with_a_secret_everything_but_health_wants_it_and_metrics_a_token_of_its_own() -> None:
    trust = GatewayTrust("s", metrics_token="m")
    for path in ("/health", "/ready"):
        trust.guard(request("10.0.0.1", path=path))
    for path in ("/metrics", "/health/deep", "/v1/chat/completions", "/v1/messages/count_tokens", "/nothing"):
        for headers in ({}, {"authorization": "Bearer x"}, {"x_penstock_secret": "m"}):
            with pytest.raises(PermissionDenied):
                trust.guard(request("127.0.0.1", path=path, **headers))
        trust.guard(request("10.0.0.1", path=path, x_penstock_secret="s"))
        trust.guard(request("10.0.0.1", path=path, authorization="Bearer s"))
    trust.guard(request("10.0.0.1", path="/metrics", authorization="bearer m"))
    with pytest.raises(PermissionDenied):
        trust.guard(request("10.0.0.1", path="/v1/models", authorization="Bearer m"))


def test_a_token_for_metrics_is_wanted_without_a_secret_too() -> None:
    trust = GatewayTrust(None, metrics_token="m")
    trust.guard(request("10.0.0.1", path="/v1/models"))
    trust.guard(request("10.0.0.1", path="/metrics", authorization="Bearer m"))
    with pytest.raises(Unauthenticated):
        trust.guard(request("127.0.0.1", path="/metrics"))


def test_without_a_secret_no_foreign_web_page_gets_in_and_with_one_it_needs_it() -> None:
    page = {"host": "127.0.0.1:8000", "origin": "http://evil.example"}
    with pytest.raises(PermissionDenied, match="web pages"):
        GatewayTrust(None).guard(request("127.0.0.1", **page))
    with pytest.raises(PermissionDenied, match="called by"):
        GatewayTrust(None).guard(request("127.0.0.1", host="evil.example"))
    with pytest.raises(PermissionDenied, match="secret"):
        GatewayTrust("s").guard(request("127.0.0.1", **page))
    GatewayTrust("s").guard(request("127.0.0.1", x_penstock_secret="s", **page))
