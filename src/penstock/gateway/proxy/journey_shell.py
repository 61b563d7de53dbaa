"""A client's request that all is known of, and the part of its journey that a proxy and an Endpoint Picker share: what
admission decides. It knows neither how a request is sent nor who writes its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from penstock.admission.decision import Admit, Decision, Shed
from penstock.core.request import KvSource
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.fallback import Chain, failure_of_shed
from penstock.gateway.proxy.journey import Actions, Journey, Leg, Role
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.accounting import RequestAccounting
from penstock.gateway.tokens.request_size import Size
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.tenancy.limits.quota import Quota


class SizedRequest(msgspec.Struct, frozen=True, gc=False):
    routed: RoutedRequest
    request: EdgeRequest
    size: Size
    body: bytes  # as its replicas are sent it
    quota: Quota | None  # of its tenant; None: no limits
    chain: Chain | None  # of models, where its route has fallbacks


def leg_of(choice: Choice) -> Leg:
    """The attempt that a choice leads to: the replica that answers, and where it may pull KV blocks from."""
    assert choice.replica is not None
    source = choice.source
    pulls = KvSource(source.replica.kv_address, source.prefills) if source is not None else None
    return Leg(Role.WHOLE, choice.replica.id, pulls, source.replica.id if source is not None else "")


class JourneyShell(ABC):
    """Tells a journey what happened, and runs the actions that it answers with."""

    __slots__ = ("_account", "_chain", "_choice", "_journey", "_routed", "_size", "request")

    def __init__(self, sized: SizedRequest, journey: Journey, account: RequestAccounting) -> None:
        self.request = sized.request
        self._routed = sized.routed
        self._size = sized.size
        self._chain = sized.chain
        self._choice: Choice | None = None  # of its replica, and why
        self._journey = journey
        self._account = account

    @abstractmethod
    def _run(self, actions: Actions) -> None: ...

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Admit):
            self._choice = decision.choice
            self._account.chose(self.request, decision.choice)
            self._run(self._journey.admitted(leg_of(decision.choice)))
        elif isinstance(decision, Shed):
            error = refusals.shed(decision, self._size)
            self._run(self._journey.shed(failure_of_shed(decision.reason), error))
