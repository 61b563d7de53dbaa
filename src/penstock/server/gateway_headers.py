"""A request as it comes in: from a client, or from a gateway, which may say more than a client can.

The headers a gateway adds let it choose token ids and seeds, so it has to be one: it knows the secret, or calls from
this machine where no secret is set. A replica with a secret is its gateways' alone; anybody who reaches one without may
ask the model, but no foreign web page.
"""

from __future__ import annotations

import hmac
import ipaddress
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.api import relay
from penstock.api.asgi import Message, Request
from penstock.api.page_guard import PageGuard
from penstock.core.errors import InvalidRequest, PermissionDenied, Unauthenticated
from penstock.core.request import KvSource

_PUBLIC = ("/health", "/ready")  # for whoever restarts the process, or sends it work


@dataclass(frozen=True)
class GatewayHeaders:
    body: bytes  # the client's request
    origin: relay.Origin
    is_from_gateway: bool = False
    is_relayed: bool = False  # a streamed answer is to be one that another replica can carry on
    is_relayed_whole: bool = False  # so is one that is not streamed
    prompt_ids: list[list[int]] | None = None  # rendered and tokenized at the gateway
    resume: relay.Resume | None = None
    namespace: str = ""  # the gateway's tenant, whose prefixes are its own
    watermark: str | None = None  # of that tenant's answers
    tenancy: relay.Tenancy = relay.Tenancy()  # noqa: RUF009 (a tuple)
    kv_source: KvSource | None = None  # where KV blocks of the prompt can be pulled from


class GatewayTrust:
    def __init__(self, secret: str | None, metrics_token: str | None = None, pages: PageGuard | None = None) -> None:
        self._secret = secret or None
        self._metrics_token = metrics_token or None
        self._pages = pages or PageGuard()
        self.draw_seed: Callable[[], int] = lambda: random.getrandbits(63)  # for a request that has none

    @property
    def has_secret(self) -> bool:
        return self._secret is not None

    @property
    def pages(self) -> PageGuard:
        return self._pages

    def guard(self, request: Request) -> None:
        """The guard of every request, before all else. Raises unless its sender may use this replica."""
        if request.path in _PUBLIC:
            return
        if request.path == "/metrics" and self._metrics_token is not None:
            if _is_same(_bearer(request), self._metrics_token):
                return
            if self._secret is None:
                raise Unauthenticated("this takes the replica's metrics_token: Authorization: Bearer TOKEN")
        if self._secret is not None:
            self.check(request)
        else:
            self._pages.check(dict(request.raw_headers))

    def admit_socket(self, headers: Mapping[bytes, bytes], client: str) -> str:
        """A WebSocket's owner, whose requests are guarded like all others. Raises Unauthenticated where the secret is
        still to come."""
        offered = headers.get(relay.SECRET_HEADER.encode()) or headers.get(b"authorization")
        if self._secret is not None and not offered:
            raise Unauthenticated("this replica is its gateways' alone: its secret is needed")
        if self._secret is None:
            self._pages.check(headers)
        else:
            self.guard(_request_of(headers, client))
        return ""

    def check_caller(self, headers: Mapping[bytes, bytes], client: str) -> None:
        """`guard` and `check`, for a call of another protocol."""
        request = _request_of(headers, client)
        self.guard(request)
        self.check(request)

    def check(self, request: Request) -> None:
        """Raises unless the sender is a gateway."""
        if self._secret is not None:
            # SDKs, `penstock top` and `penstock bench` have no header of their own for it.
            offered = request.headers.get(relay.SECRET_HEADER) or _bearer(request)
            if not _is_same(offered, self._secret):
                raise PermissionDenied("this is for gateways that know the secret of this replica")
        elif not _is_loopback(request.client):
            raise PermissionDenied("this is for gateways on this machine; for others set gateway_secret")

    def read(self, request: Request, body: bytes) -> GatewayHeaders:
        named = (relay.HEADER, relay.NAMESPACE_HEADER, relay.WATERMARK_HEADER, relay.TENANT_HEADER)
        mode, namespace, mark, tenant = (request.headers.get(name) for name in named)
        source = request.headers.get(relay.KV_SOURCE_HEADER)
        is_whole = relay.WHOLE_HEADER in request.headers
        if not is_whole and all(value is None for value in (mode, namespace, mark, tenant, source)):
            return GatewayHeaders(body, self._new_origin())
        self.check(request)
        namespace = namespace or ""
        tenancy = relay.read_tenant(tenant) if tenant is not None else relay.Tenancy(namespace)
        kv_source = relay.read_kv_source(source) if source is not None else None
        if mode is None or mode == relay.STREAM:
            is_relayed = mode is not None
            return GatewayHeaders(
                body,
                self._new_origin(),
                True,
                is_relayed,
                is_whole,
                namespace=namespace,
                watermark=mark,
                tenancy=tenancy,
                kv_source=kv_source,
            )
        if mode != relay.ENVELOPE:
            raise InvalidRequest(f"{relay.HEADER}: expected '{relay.STREAM}' or '{relay.ENVELOPE}'")
        envelope = relay.open_envelope(body)
        origin = envelope.resume.origin if envelope.resume else self._new_origin()
        return GatewayHeaders(
            bytes(envelope.request),
            origin,
            True,
            True,
            is_whole,
            envelope.prompt_ids,
            envelope.resume,
            namespace,
            mark,
            tenancy,
            kv_source,
        )

    def _new_origin(self) -> relay.Origin:
        return relay.Origin(id=uuid.uuid4().hex, created=int(time.time()), seed=self.draw_seed())


def _request_of(headers: Mapping[bytes, bytes], client: str) -> Request:
    return Request({"method": "GET", "path": "", "client": (client, 0), "headers": list(headers.items())}, _nothing)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _bearer(request: Request) -> str:
    offered = request.headers.get("authorization", "")
    return offered[7:].strip() if offered[:7].lower() == "bearer " else ""


def _is_same(offered: str, secret: str) -> bool:
    return hmac.compare_digest(offered.encode(), secret.encode())


def _is_loopback(address: str | None) -> bool:
    """A Unix socket has no address."""
    return address is None or ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
