"""Authentication of administrators: an admin's key opens, and nothing else does.

Where there is neither a tenant nor an admin yet, whoever is on this machine may, so that a first try needs no ceremony.
Web pages are on this machine too: what a browser sends for a page of another origin is refused, and so is a host name
that is not this machine's own, behind which a page may hide (DNS rebinding).
"""

from __future__ import annotations

import re

from penstock.api.page_guard import is_foreign_page
from penstock.core.errors import PermissionDenied, Unauthenticated
from penstock.http.message import Request
from penstock.tenancy.admins import AdminKey, AdminRing
from penstock.tenancy.keys import KeyRing

_OWN_NAMES = (b"127.0.0.1", b"localhost", b"[::1]")
_PORT = re.compile(rb":\d+\Z")
_HINT = "Authorization: Bearer psa_…, made by `penstock admins add NAME`"


class Guard:
    def __init__(self, admins: AdminRing, keys: KeyRing, *, is_loopback: bool) -> None:
        self._admins = admins
        self._keys = keys
        self._is_loopback = is_loopback

    @property
    def is_open(self) -> bool:
        return self._is_loopback and not self._keys.has_had_tenants and not self._admins.has_had_admins

    def check(self, request: Request) -> AdminKey | None:
        """Raises unless the request may pass; None: it is open to everybody here."""
        headers = request.headers
        host = headers.get(b"host", b"").lower()
        if is_foreign_page(headers):
            raise PermissionDenied("web pages of other origins may not administer this gateway")
        if self.is_open:
            if _PORT.sub(b"", host) not in _OWN_NAMES:
                raise PermissionDenied("without an admin key this is reached by a name of this machine only: 127.0.0.1")
            return None
        offered = headers.get(b"authorization", b"")
        key = offered[7:].strip() if offered[:7].lower() == b"bearer " else b""
        if not key:
            raise Unauthenticated(f"an admin key is needed: {_HINT}")
        if key.startswith(b"psk_"):
            raise PermissionDenied(f"a tenant's key does not administer; an admin's is needed: {_HINT}")
        return self._admins.authenticate(key)
