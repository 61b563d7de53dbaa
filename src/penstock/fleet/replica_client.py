"""HTTP client of the controller for replicas: its report, a real token, and to park or wake."""

from __future__ import annotations

import msgspec

from penstock.api import relay
from penstock.api.parking import PARK_PATH, WAKE_PATH
from penstock.api.replica_report import ReplicaReport, decode
from penstock.gateway.replicas.fetch import fetch
from penstock.http.call import Failure
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.message import render
from penstock.http.upstream import Upstream

_REPORT_S = 2.0
_TOKEN_S = 30.0
_PARK_S = 120.0


class ReplicaClient:
    """Belongs to the event loop. Connections are kept by address."""

    def __init__(self, secret: str | None, clock: TimerClock = LOOP_CLOCK) -> None:
        headers = [(b"content-type", b"application/json")]
        if secret is not None:
            headers.append((relay.SECRET_HEADER.encode(), secret.encode()))
        self._headers = render(headers)
        self._clock = clock
        self._upstreams: dict[str, Upstream] = {}

    async def report(self, url: str) -> ReplicaReport | None:
        """None: it does not answer, or not in time."""
        answer = await fetch(self._upstream(url), b"/v1/penstock/snapshot", self._headers, timeout_s=_REPORT_S)
        if isinstance(answer, Failure) or answer.status != 200:
            return None
        try:
            return decode(answer.body)
        except msgspec.DecodeError:
            return None

    async def makes_token(self, url: str) -> bool:
        """Whether a real token came out."""
        answer = await fetch(self._upstream(url), b"/health/deep", self._headers, timeout_s=_TOKEN_S)
        return not isinstance(answer, Failure) and answer.status == 200

    async def park(self, url: str) -> str:
        """Gives its device memory back. Returns why not, if it could not."""
        return await self._post(url, PARK_PATH.encode())

    async def wake(self, url: str) -> str:
        """Returns when a real token came out, or why none did."""
        return await self._post(url, WAKE_PATH.encode())

    def forget(self, url: str) -> None:
        if (upstream := self._upstreams.pop(url, None)) is not None:
            upstream.close()

    def close(self) -> None:
        for url in list(self._upstreams):
            self.forget(url)

    async def _post(self, url: str, target: bytes) -> str:
        answer = await fetch(self._upstream(url), target, self._headers, timeout_s=_PARK_S, body=b"{}")
        if isinstance(answer, Failure):
            return answer.message
        return "" if answer.status == 200 else answer.body.decode(errors="replace")[:500]

    def _upstream(self, url: str) -> Upstream:
        found = self._upstreams.get(url)
        if found is None:
            found = self._upstreams[url] = Upstream.from_url(url, clock=self._clock)
        return found
