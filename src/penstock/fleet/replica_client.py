"""HTTP client of the controller for replicas of any engine: a report, a real token, and to park or wake.

What a replica is, is found out when it first answers. One that is not penstock's is asked in its own dialect.
"""

from __future__ import annotations

import ssl
from functools import partial

import msgspec

from penstock.api import relay
from penstock.api.replica_report import ReplicaReport, decode
from penstock.api.replica_role import ROLE_PATH, RoleRequest
from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.core.measurements import EngineLoad, EngineMeasurements
from penstock.core.settings import Role
from penstock.dialects import parking
from penstock.dialects.dialect import Dialect, Signal
from penstock.dialects.engines.openai import PENSTOCK
from penstock.dialects.liveness import Answer, Liveness, liveness
from penstock.dialects.reading import Values, read
from penstock.gateway.replicas.fetch import fetch
from penstock.http.call import Failure
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.message import render
from penstock.http.upstream import Upstream

_SNAPSHOT = "/v1/penstock/snapshot"
_REPORT_S = 2.0
_TOKEN_S = 30.0
_PARK_S = 120.0


class ReplicaClient:
    """Belongs to the event loop. Connections and dialects are kept by address."""

    def __init__(
        self,
        secret: str | None,
        clock: TimerClock = LOOP_CLOCK,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        """`tls` and `server_name`: of https:// replicas, as an `Upstream` has them."""
        headers = [(b"content-type", b"application/json")]
        if secret is not None:
            headers.append((relay.SECRET_HEADER.encode(), secret.encode()))
        self._headers = render(headers)
        self._clock = clock
        self._tls = tls
        self._server_name = server_name
        self._upstreams: dict[str, Upstream] = {}
        self._dialects: dict[str, Dialect] = {}

    async def report(self, url: str) -> ReplicaReport | None:
        """None: it does not answer, or not in time."""
        ask = self._asking(url, _REPORT_S)
        try:
            dialect = self._dialects.get(url, PENSTOCK)
            if dialect is PENSTOCK:
                answer = await ask("GET", _SNAPSHOT, None)
                if answer.status == 200:
                    self._dialects[url] = PENSTOCK
                    return decode(answer.body)
                if answer.status not in parking.UNKNOWN_PATH:
                    return None
                dialect = self._dialects[url] = await parking.detected(ask)
            return await _report(ask, dialect)
        except (EngineUnavailable, msgspec.DecodeError):
            return None

    async def makes_token(self, url: str) -> bool:
        """Whether a real token came out."""
        try:
            await parking.make_token(self._asking(url, _TOKEN_S), self._dialects.get(url, PENSTOCK))
        except PenstockError:
            return False
        return True

    async def park(self, url: str) -> None:
        """Gives its device memory back. Raises why not, if it could not."""
        await parking.park(self._asking(url, _PARK_S), self._dialects.get(url))

    async def wake(self, url: str) -> None:
        """Returns when a real token came out. Raises why none did."""
        await parking.wake(self._asking(url, _PARK_S), self._dialects.get(url))

    async def set_role(self, url: str, role: Role) -> None:
        """Changes what gateways send to a penstock replica. Raises why not, if it could not."""
        answer = await self._asking(url, _REPORT_S)("POST", ROLE_PATH, msgspec.json.encode(RoleRequest(role)))
        try:
            has_it = answer.status == 200 and decode(answer.body).role == role
        except msgspec.DecodeError:  # of another engine
            has_it = False
        if not has_it:
            raise EngineUnavailable(f"it does not take the role {role}: it answered {answer.status}")

    def forget(self, url: str) -> None:
        self._dialects.pop(url, None)
        if (upstream := self._upstreams.pop(url, None)) is not None:
            upstream.close()

    def close(self) -> None:
        for url in list(self._upstreams):
            self.forget(url)

    def _asking(self, url: str, timeout_s: float) -> parking.Ask:
        upstream = self._upstreams.get(url)
        if upstream is None:
            found = Upstream.from_url(url, tls=self._tls, server_name=self._server_name, clock=self._clock)
            upstream = self._upstreams[url] = found
        return partial(self._ask, upstream, timeout_s)

    async def _ask(self, upstream: Upstream, timeout_s: float, method: str, path: str, body: bytes | None) -> Answer:
        """A GET has no body, a POST has one."""
        answer = await fetch(upstream, path.encode(), self._headers, timeout_s=timeout_s, body=body)
        if isinstance(answer, Failure):
            raise EngineUnavailable(answer.message)
        return answer


async def _report(ask: parking.Ask, dialect: Dialect) -> ReplicaReport:
    """Report of a replica that is not penstock's, as far as its dialect tells."""
    answer = await ask("GET", dialect.health.path.decode(), None)
    is_ready = liveness(dialect, answer, is_refused=False, was_ready=False) is Liveness.READY
    values = await _load(ask, dialect) if is_ready else {}
    running, waiting = int(values.get(Signal.RUNNING, 0)), int(values.get(Signal.WAITING, 0))
    load = EngineLoad(num_open=running + waiting, num_running=running, num_waiting=waiting)
    is_asleep = values.get(Signal.IS_AWAKE) == 0
    return ReplicaReport(
        "",
        "",
        "parked" if is_asleep else "ready" if is_ready else "starting",
        can_park=is_ready and await parking.can_park(ask, dialect),
        measured=EngineMeasurements(load),
    )


async def _load(ask: parking.Ask, dialect: Dialect) -> Values:
    for document in dialect.loads if dialect.has_load else ():
        answer = await ask("GET", document.path.decode(), None)
        if answer.status == 200:
            return read(document, answer.body)
    return {}
