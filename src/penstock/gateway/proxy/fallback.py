"""Where a request goes when its model cannot serve it: along the chain of the route it asked for, each model once.

A `Chain` belongs to one request whose route has fallbacks. It decides and remembers; it sends nothing, and is asked
only while the client has seen nothing. What is wrong with the request itself never leads on, but its length does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from penstock.admission.admission import Admission
from penstock.admission.decision import ShedReason
from penstock.core.replica import ReplicaState
from penstock.gateway.proxy.routed_request import RoutedRequest, body_for
from penstock.gateway.tokens.request_size import Pool, Size
from penstock.http.clock import Timer, TimerClock
from penstock.router.request import EdgeRequest
from penstock.router.routes import Failure, Route, RouteTable

HEADER = b"x-penstock-fallback"
_OURS_TO_FIX = (401, 402, 404, 408)  # from a provider: our key, our bill, our name for the model, its patience
_MAY_BE_LENGTH = (400, 413, 422)
_LENGTH = re.compile(
    rb"context.?(length|size|window)|prompt is too long|maximum context|max_new_tokens|too many tokens", re.IGNORECASE
)


class Move(NamedTuple):
    request: EdgeRequest
    size: Size
    body: bytes


class Chain:
    def __init__(
        self,
        routes: RouteTable,
        pools: Mapping[str, Pool],
        admission: Admission,
        clock: TimerClock,
        routed: RoutedRequest,
        models: Collection[str],
        output: int | None,
    ) -> None:
        """`models`: those the tenant may use; `output`: the limit of one choice."""
        self.header = b""
        self._routes = routes
        self._pools = pools
        self._admission = admission
        self._clock = clock
        self._routed = routed
        self._route = routed.route
        self._models = models
        self._output = output
        self._tried = [routed.route.name]
        self._timer: Timer | None = None

    def move(self, failure: Failure, request: EdgeRequest) -> Move | None:
        """The request for the next model that may take it; None: here the chain ends."""
        route = self._next(failure)
        if route is None:
            return None
        self.close()
        step = f"{self._tried[-1]}->{route.name}; {failure.value}".encode()
        self.header = b"%b: %b\r\n" % (HEADER, step) if not self.header else self.header[:-2] + b", %b\r\n" % step
        self._tried.append(route.name)
        return self._to_route(route, request)

    def watch(self, is_slow: Callable[[], None]) -> None:
        """From now on the present model has so long for its first byte."""
        if self._route.slow_after_s is not None and self._next(Failure.SLOW) is not None:
            self._timer = self._clock.call_later(self._route.slow_after_s, is_slow)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def holds_back(self, status: int | None) -> bool:
        """Whether an answer is to be read before the client sees it: the next model may have a better one."""
        if status in _OURS_TO_FIX:
            return self._next(Failure.ERROR) is not None
        return status in _MAY_BE_LENGTH and self._next(Failure.CONTEXT_LENGTH) is not None

    def _next(self, failure: Failure) -> Route | None:
        """Past those that the tenant may not use and, where the present model is only slow, those without a replica."""
        skipped = list(self._tried)
        while (route := self._routes.next_after(failure, skipped)) is not None:
            if route.model in self._models and (failure is not Failure.SLOW or self._is_ready(route)):
                return route
            skipped.append(route.name)
        return None

    def _to_route(self, route: Route, request: EdgeRequest) -> Move:
        """Another model counts otherwise. It is not counted here again: whether it fits is for its replica to say."""
        routed, target = self._routed, route.target(self._routed.bucket)
        path, namespace = routed.surface.path, routed.caller.tenant.namespace
        size = Size(self._pools[target.pool], path, routed.body, routed.view, self._output, namespace)
        moved = replace(
            request,
            model=target.pool,
            prompt_tokens=size.prompt,
            max_tokens=size.max_tokens if size.output is not None else request.max_tokens,
            context_tokens=size.context_tokens,
            hashes=(),
            adapter=target.adapter,
            version=target.version,
        )
        return Move(moved, size, body_for(routed, size, target.adapter))

    def _is_ready(self, route: Route) -> bool:
        admission, now = self._admission, self._clock.now()
        replicas = [replica for share in route.pools for replica in admission.replicas(share.pool)]
        return any(r.state_at(now) is ReplicaState.READY and not r.is_tripped for r in replicas)


def failure_of_shed(reason: ShedReason) -> Failure:
    """Refused for load is an error to a client that has somewhere else to go."""
    return Failure.CONTEXT_LENGTH if reason is ShedReason.TOO_LARGE else Failure.ERROR


def failure_of_answer(status: int | None, body: bytes) -> Failure | None:
    """Returns the failure of an answer that was held back. None: the client's own affair."""
    if status in _OURS_TO_FIX:
        return Failure.ERROR
    return Failure.CONTEXT_LENGTH if _LENGTH.search(body) else None
