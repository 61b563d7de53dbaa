"""A request as it comes in: from a client, or from a gateway, which may say more than a client can.

What a gateway adds lets it choose token ids and seeds, so it has to be one: it knows the secret, or calls from this
machine where no secret is set.
"""

from __future__ import annotations

import hmac
import ipaddress
import random
import time
import uuid
from dataclasses import dataclass

from penstock.api import relay
from penstock.api.asgi import Request
from penstock.core.errors import InvalidRequest, PermissionDenied


@dataclass(frozen=True)
class Incoming:
    body: bytes  # the client's request
    origin: relay.Origin
    is_from_gateway: bool = False
    is_relayed: bool = False  # a streamed answer is to be one that another replica can carry on
    prompt_ids: list[list[int]] | None = None  # rendered and tokenized at the gateway
    resume: relay.Resume | None = None
    namespace: str = ""  # the gateway's tenant, whose prefixes are its own
    watermark: str | None = None  # of that tenant's answers
    tenancy: relay.Tenancy = relay.Tenancy()  # noqa: RUF009 (a tuple)


class GatewayTrust:
    def __init__(self, secret: str | None) -> None:
        self._secret = secret or None

    def check(self, request: Request) -> None:
        if self._secret is not None:
            offered = request.headers.get(relay.SECRET_HEADER, "")
            if not hmac.compare_digest(offered.encode(), self._secret.encode()):
                raise PermissionDenied("this is for gateways that know the secret of this replica")
        elif not _is_loopback(request.client):
            raise PermissionDenied("this is for gateways on this machine; for others set gateway_secret")

    def read(self, request: Request, body: bytes) -> Incoming:
        named = (relay.HEADER, relay.NAMESPACE_HEADER, relay.WATERMARK_HEADER, relay.TENANT_HEADER)
        mode, namespace, mark, tenant = (request.headers.get(name) for name in named)
        if mode is None and namespace is None and mark is None and tenant is None:
            return Incoming(body, new_origin())
        self.check(request)
        namespace = namespace or ""
        tenancy = relay.read_tenant(tenant) if tenant is not None else relay.Tenancy(namespace)
        if mode is None or mode == relay.STREAM:
            is_relayed = mode is not None
            return Incoming(body, new_origin(), True, is_relayed, namespace=namespace, watermark=mark, tenancy=tenancy)
        if mode != relay.ENVELOPE:
            raise InvalidRequest(f"{relay.HEADER}: expected '{relay.STREAM}' or '{relay.ENVELOPE}'")
        envelope = relay.open_envelope(body)
        origin = envelope.resume.origin if envelope.resume else new_origin()
        return Incoming(
            bytes(envelope.request),
            origin,
            True,
            True,
            envelope.prompt_ids,
            envelope.resume,
            namespace,
            mark,
            tenancy,
        )


def new_origin() -> relay.Origin:
    return relay.Origin(id=uuid.uuid4().hex, created=int(time.time()), seed=random.getrandbits(63))


def _is_loopback(address: str | None) -> bool:
    """A Unix socket has no address."""
    return address is None or ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback
