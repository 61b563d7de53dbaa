"""Who is a gateway."""

import pytest

from penstock.api.asgi import Request
from penstock.core.errors import PermissionDenied
from penstock.server.incoming import GatewayTrust


def request(client: str | None, **headers: str) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    peer = (client, 1) if client else None
    return Request({"method": "POST", "path": "/", "headers": raw, "client": peer}, receive)


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
