from __future__ import annotations

import pytest

from penstock.core.errors import PenstockError, PermissionDenied, Unauthenticated
from penstock.gateway.admin.guard import Guard
from penstock.http.message import Request
from penstock.tenancy.admins import AdminRing, new_admin_key
from penstock.tenancy.keys import KeyRing, TenantState, new_key
from penstock.tenancy.tenants import Tenant

ADMIN = new_admin_key("root", now_s=0)
TENANT = new_key("acme", now_s=0)


def request(host: bytes = b"127.0.0.1:8000", **headers: bytes) -> Request:
    sent = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return Request(b"GET", b"/admin/v1/tenants", {b"host": host, **sent}, b"")


def guard(*, tenants: bool = False, admins: bool = False, is_loopback: bool = True) -> Guard:
    keys, ring = KeyRing(), AdminRing()
    if tenants:
        keys.apply([TenantState("acme", Tenant("acme"), (TENANT.record,))])
    if admins:
        ring.apply([ADMIN.record])
    return Guard(ring, keys, is_loopback=is_loopback)


@pytest.mark.parametrize("host", [b"127.0.0.1:8000", b"localhost:8000", b"LOCALHOST", b"[::1]:8000", b"127.0.0.1"])
def test_with_nobody_configured_it_is_open_on_this_machine(host: bytes) -> None:
    assert guard().is_open
    assert guard().check(request(host)) is None
    assert guard().check(request(host, origin=b"http://" + host)) is None


@pytest.mark.parametrize(
    "wrong",
    [
        request(b"evil.example:8000"),  # a name that resolves to this machine
        request(b"127.0.0.1.evil.example"),
        request(b""),
        request(b"localhost:80@evil.example"),
        request(origin=b"http://evil.example"),
        request(origin=b"http://127.0.0.1:3000"),
        request(origin=b"null"),
        request(sec_fetch_site=b"cross-site"),
    ],
    ids=range(8),
)
def test_no_web_page_can_use_what_is_open(wrong: Request) -> None:
    with pytest.raises(PermissionDenied):
        guard().check(wrong)


@pytest.mark.parametrize(
    "closed",
    [guard(tenants=True), guard(admins=True), guard(is_loopback=False), guard(tenants=True, admins=True)],
    ids=["tenants", "admins", "not loopback", "both"],
)
def test_otherwise_an_admins_key_is_needed(closed: Guard) -> None:
    assert not closed.is_open
    for authorization in (b"", b"Bearer ", b"Basic abc", b"Bearer psa_0123456789_x", ADMIN.secret.encode()):
        with pytest.raises(Unauthenticated):
            closed.check(request(authorization=authorization))
    with pytest.raises(PermissionDenied):
        closed.check(request(authorization=b"Bearer " + TENANT.secret.encode()))


def test_an_admins_key_opens_from_anywhere_but_another_page() -> None:
    closed, authorization = guard(tenants=True, admins=True), b"Bearer " + ADMIN.secret.encode()
    for host in (b"127.0.0.1:8000", b"admin.example"):
        assert closed.check(request(host, authorization=authorization)) == ADMIN.record
    with pytest.raises(PenstockError):
        closed.check(request(authorization=authorization, origin=b"http://evil.example"))
