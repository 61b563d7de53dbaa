"""The replicas' endpoints as Envoy knows them: ip:port. A replica whose URL has a name in it cannot be picked."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable
from urllib.parse import urlsplit

from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.observe.redaction import redact

log = logging.getLogger("penstock.gateway")

_PORTS = {"http": 80, "https": 443}


class Endpoints(Subscriber):
    def __init__(self) -> None:
        self._by_id: dict[str, str] = {}
        self._num_left_out = 0

    def replica_added(self, replica: Replica) -> None:
        endpoint = endpoint_of(replica.url)
        if endpoint is None:
            self._num_left_out += 1
            log.warning("%s is left out: Envoy goes to addresses, not to names", redact(replica.url))
        else:
            self._by_id[replica.id] = endpoint

    def replica_removed(self, replica: Replica) -> None:
        if self._by_id.pop(replica.id, None) is None:
            self._num_left_out -= 1

    def named(self, ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._by_id[one] for one in ids if one in self._by_id)

    def replica_at(self, endpoint: str) -> str | None:
        """The id of the replica with this ip:port; None: there is none."""
        return next((one for one, where in self._by_id.items() if where == endpoint), None)

    def allowed(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        """Ids of the replicas in a subset that Envoy names, each as ip:port or ip; None: all of them."""
        if subset is None:
            return frozenset(self._by_id) if self._num_left_out else None
        found = self._by_id.items()
        return frozenset(one for one, where in found if where in subset or where.rpartition(":")[0] in subset)


def endpoint_of(url: str) -> str | None:
    """ip:port; None: the URL has a name for an address."""
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"
