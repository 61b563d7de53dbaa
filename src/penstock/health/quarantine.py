"""Requests that replicas were lost with: who is sent elsewhere, who is suspected, and who is refused.

**The rule.** A replica is lost with a request if, while it had the request, its connection broke, it fell silent, it
hung, or its engine died; one that could not be connected to, that drains, or that answers with an error is not lost.

- A request that has lost one replica goes on at another, before its first byte or after it.
- A request that has lost two is sent to no third one, ever. It is refused, and so is the same body of the same tenant
  for ten minutes, unless it has an alibi: the second replica had made `ALIBI_TOKENS` for it. What a replica does not
  survive it meets again where it left off, so it does not get so far; a bystander does. With an alibi it may go back to
  either of the two, and waits for that (`stranded`), and its body is not refused. Where both are gone for good, as a
  controller's are, it may go to any other.
- A replica that dies takes bystanders with it. Those that it had made so many tokens for are sent to other replicas
  than those that had just come, wherever there are two to choose from (`apart`): so the bystanders go on where the
  culprit is not, and what has lost the same two replicas is as a rule the culprit alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from hashlib import blake2b
from zlib import crc32

import msgspec

from penstock.core.errors import RequestQuarantined

ALIBI_TOKENS = 16
_HELD_S = 600.0
_MAX_HELD = 4096  # bodies; the oldest goes first
_MAX_LOST = 2  # replicas, with one request


class Losses(msgspec.Struct, eq=False):
    """The replicas that were lost with one request."""

    replicas: set[str] = msgspec.field(default_factory=set)
    _num: int = 0
    _has_alibi: bool = False
    _last: str = ""

    def add(self, replica_id: str, num_tokens: int) -> None:
        """`num_tokens`: that this replica had made for the request since it was last sent there."""
        self.replicas.add(replica_id)
        self._num += 1
        self._has_alibi = num_tokens >= ALIBI_TOKENS
        self._last = replica_id

    @property
    def is_culprit(self) -> bool:
        return self._num >= _MAX_LOST and not self._has_alibi

    def forbidden(self, replicas: Collection[str]) -> frozenset[str]:
        """Those of `replicas`, which are all there are, that it is not sent to."""
        may_return = len(self.replicas) >= _MAX_LOST and not self.replicas.isdisjoint(replicas)
        return frozenset(replicas) - self.replicas if may_return else frozenset()

    def apart(self, ready: Collection[str]) -> frozenset[str]:
        """Those of `ready` replicas that are for the others of the same loss, if there is a choice."""
        if not self._num or len(ready) < 2:
            return frozenset()
        trial = min(ready, key=lambda name: crc32(f"{self._last} {name}".encode()))  # the same for all of this loss
        return frozenset((trial,)) if self._has_alibi else frozenset(ready) - {trial}


class Quarantine:
    """Bodies that are refused for a while, by tenant. A tenant that has none is asked for nothing but a look."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, bytes], float] = OrderedDict()  # until when
        self._tenants: dict[str, int] = {}  # how many of each are held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, tenant: str, path: bytes, body: bytes, now: float) -> str:
        """Its fingerprint, for those who read logs."""
        key = tenant, _digest(path, body)
        if self._held.pop(key, None) is None:
            self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        self._held[key] = now + _HELD_S
        if len(self._held) > _MAX_HELD:
            self._drop_oldest()
        return key[1].hex()

    def check(self, tenant: str, path: bytes, body: bytes, now: float) -> None:
        while self._held and next(iter(self._held.values())) <= now:
            self._drop_oldest()
        if tenant in self._tenants and (until := self._held.get((tenant, _digest(path, body)))) is not None:
            raise RequestQuarantined(
                f"replicas were lost with this very request before: it is refused for another {until - now:.0f} s"
            )

    def _drop_oldest(self) -> None:
        (tenant, _), _ = self._held.popitem(last=False)
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]


def refusal() -> RequestQuarantined:
    """The error for the request that has just been found out."""
    return RequestQuarantined(
        f"{_MAX_LOST} replicas were lost while they worked on this request: it is refused, and so is the same request "
        f"for the next {_HELD_S / 60:.0f} minutes"
    )


def _digest(path: bytes, body: bytes) -> bytes:
    hasher = blake2b(path, digest_size=8)
    hasher.update(body)
    return hasher.digest()
