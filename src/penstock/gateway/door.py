"""The gateway's application: who may come in, what is asked of whom, and the books that are kept on it.

`Door` is called once per request by `http.server` and never waits; a request that must wait is a `Passage` that is
called back. It owns the admission, the replicas and the clock they share: the event loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from secrets import randbits, token_hex
from typing import Protocol
from zlib import crc32

from penstock.admission.admission import Admission, Used
from penstock.api.errors import OPENAI, Convention, error_headers
from penstock.api.openai.models import ModelCard, model_list
from penstock.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    PenstockError,
    Unauthenticated,
)
from penstock.core.replica import UNBOUNDED, ReplicaState
from penstock.gateway.asked import SURFACES, Asked, Surface, read, with_model, with_output_limit
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.message import JSON, render
from penstock.gateway.passage import Passage
from penstock.gateway.replicas import Follower, Replica
from penstock.gateway.retries import RetryBudget
from penstock.gateway.spent import TokenUsage
from penstock.router.request import EdgeRequest
from penstock.router.routes import Route, RouteTable
from penstock.tenancy.budgets import Budgets
from penstock.tenancy.keys import Caller, KeyRing
from penstock.tenancy.limits.limiter import Limiter
from penstock.tenancy.limits.quota import Quota, Rate
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import Usage

ANYBODY = Caller(Tenant(id="anonymous", adapters=("*",)), key_id="")
_TRIPPED_S = 0.5  # how often a provider's breaker is looked at
_POLL_S = 0.05  # how often the queues are looked at while somebody waits


class Recorder(Protocol):
    def record(self, usage: Usage) -> object: ...


@dataclass(frozen=True)
class Books:
    """Who is let in and what they use: the tenancy's side of the door."""

    keys: KeyRing
    limiter: Limiter
    budgets: Budgets
    ledger: Recorder


class Door:
    def __init__(self, routes: RouteTable, replicas: Iterable[Replica], books: Books, admission: Admission) -> None:
        self.admission = admission
        self.limiter = books.limiter
        self.replicas: Mapping[str, Replica] = {replica.id: replica for replica in replicas}
        self.retries = RetryBudget()
        self.now = asyncio.get_running_loop().time
        self._routes = routes
        self._books = books
        self._waiting: dict[str, Passage] = {}
        self._quotas: dict[Tenant, Quota | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = int(time.time())
        self._followers = [Follower(replica, self.replica_changed) for replica in self.replicas.values()]

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        for replica in self.replicas.values():
            replica.upstream.close()
        if self._timer is not None:
            self._timer.cancel()

    # -- requests

    def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        surface = SURFACES.get(request.path)
        convention = surface.convention if surface is not None else OPENAI
        request_id = token_hex(12)
        try:
            if surface is None:
                self._look(exchange, request_id)
            elif request.method != b"POST":
                raise MethodNotAllowed(f"{request.path.decode(errors='replace')} takes POST")
            else:
                self._enter(exchange, surface, request_id)
        except PenstockError as error:
            self.refuse(exchange, convention, error, request_id)

    def _enter(self, exchange: Exchange, surface: Surface, request_id: str) -> None:
        caller = self._authenticate(exchange)
        tenant = caller.tenant
        body = exchange.request.body
        asked = read(body)
        route = self._route(tenant, asked.model)
        self._books.budgets.check(tenant, time.time())
        prompt_tokens = len(body)
        output_tokens = self._output_tokens(tenant, surface, asked)
        if output_tokens is None:
            output_tokens = self._context_left(route, prompt_tokens)
        elif asked.output_limit is None and output_tokens != surface.default_output:
            body = with_output_limit(body, output_tokens)
        if tenant.limits.max_input is not None and prompt_tokens > tenant.limits.max_input:
            raise ContextLengthExceeded(
                f"the prompt may have {prompt_tokens} tokens; this tenant's limit is {tenant.limits.max_input}",
                reason="max_input",
            )
        draw = randbits(32) / 2**32
        pool = route.pool(draw)
        if asked.model != pool:
            body = with_model(body, pool)
        request = EdgeRequest(
            id=request_id,
            model=pool,
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens * asked.num_choices,
            tenant=tenant.id,
            priority=tenant.priority.priority,
            session=asked.session,
            draw=draw,
            fingerprint=crc32(body) | 1,
        )
        self.retries.earn()
        Passage(self, exchange, surface, caller, asked, request, body).begin()

    def _authenticate(self, exchange: Exchange) -> Caller:
        keys = self._books.keys
        if not keys.has_had_tenants:
            return ANYBODY
        headers = exchange.request.headers
        offered = headers.get(b"authorization", b"")
        key = offered[7:] if offered[:7].lower() == b"bearer " else headers.get(b"x-api-key")
        if not key:
            raise Unauthenticated("an API key is needed: Authorization: Bearer psk_… or x-api-key")
        return keys.authenticate(key.strip(), time.time())

    def _route(self, tenant: Tenant, name: str) -> Route:
        """What a tenant may not use does not exist for it."""
        visible = self._visible(tenant)
        route = self._routes.find(name, visible)
        if route.name.partition("@")[0] not in visible:
            raise ModelNotFound(f"no model '{name}'", param="model")
        return route

    def _visible(self, tenant: Tenant) -> list[str]:
        return [name for name in self._routes.routes if tenant.may_use_model(name)]

    @staticmethod
    def _output_tokens(tenant: Tenant, surface: Surface, asked: Asked) -> int | None:
        """Of one choice; None: nobody has set a limit, so it is what the context leaves."""
        most = tenant.limits.max_output
        wanted = asked.output_limit or surface.default_output
        if wanted is None:
            return most
        if most is not None and wanted > most:
            if asked.output_limit is None:
                return most
            raise InvalidRequest(f"max_tokens is {wanted}; this tenant's limit is {most}", param="max_tokens")
        return wanted

    def _context_left(self, route: Route, prompt_tokens: int) -> int:
        pools = {share.pool for share in route.pools}
        contexts = [
            replica.snapshot.max_context_tokens
            for replica in self.replicas.values()
            if replica.model in pools and replica.snapshot.max_context_tokens < UNBOUNDED
        ]
        return max(1, max(contexts, default=4096) - prompt_tokens)

    # -- what passages need

    def quota(self, tenant: Tenant) -> Quota | None:
        """None: nothing is limited, and the limiter need not be asked."""
        if tenant not in self._quotas:
            if len(self._quotas) > 10_000:  # of tenants as they once were
                self._quotas.clear()
            self._quotas[tenant] = _quota(tenant)
        return self._quotas[tenant]

    def waits(self, passage: Passage) -> None:
        self._waiting[passage.request.id] = passage
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def finished(self, request_id: str, used: Used | None) -> None:
        self._waiting.pop(request_id, None)
        self.admission.finished(request_id, self.now(), used)
        if self._waiting:
            self._decide()

    def closed(self, passage: Passage, caller: Caller, usage: TokenUsage | None) -> None:
        if usage is None:
            return
        self._books.ledger.record(
            Usage(
                request_id=passage.request.id,
                tenant_id=caller.tenant.id,
                key_id=caller.key_id,
                model=passage.request.model,
                at_s=time.time(),
                input_tokens=usage.input_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
            )
        )

    @staticmethod
    def id_header(request_id: str) -> bytes:
        return b"x-request-id: %b\r\n" % request_id.encode()

    def refuse(self, exchange: Exchange, convention: Convention, error: PenstockError, request_id: str) -> None:
        headers = JSON + render(
            [*error_headers(error), *((name, request_id.encode()) for name in convention.id_headers)]
        )
        exchange.respond(convention.status(error), headers, convention.body(error, request_id))

    # -- the queues

    def replica_changed(self, replica: Replica) -> None:
        snapshot = replica.seen(self.now())
        self.admission.replica_changed(snapshot)
        if snapshot.is_tripped and not snapshot.reports:  # it will not say when to look again
            asyncio.get_running_loop().call_later(_TRIPPED_S, self.replica_changed, replica)
        if self._waiting:
            self._decide()

    def _poll(self) -> None:
        self._timer = None
        self._decide()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _decide(self) -> None:
        for decision in self.admission.poll(self.now()):
            passage = self._waiting.pop(decision.request.id, None)
            if passage is not None:
                passage.decided(decision)

    # -- what is asked for besides

    def _look(self, exchange: Exchange, request_id: str) -> None:
        request = exchange.request
        if request.method not in (b"GET", b"HEAD"):
            raise NotFound(f"no such path: {request.path.decode(errors='replace')}")
        headers = JSON + self.id_header(request_id)
        match request.path:
            case b"/health":
                exchange.respond(200, headers, b'{"status":"ok"}')
            case b"/ready":
                is_ready = any(r.snapshot.state_at(self.now()) is ReplicaState.READY for r in self.replicas.values())
                exchange.respond(
                    200 if is_ready else 503, headers, b'{"ready":%b}' % (b"true" if is_ready else b"false")
                )
            case b"/v1/models":
                visible = self._visible(self._authenticate(exchange).tenant)
                cards = [ModelCard(id=name, created=self._started_s) for name in visible]
                exchange.respond(200, headers, model_list(cards))
            case _:
                raise NotFound(f"no such path: {request.path.decode(errors='replace')}")


def _quota(tenant: Tenant) -> Quota | None:
    limits = tenant.limits
    quota = Quota(
        requests=Rate(limits.requests_per_minute, limits.burst_s) if limits.requests_per_minute else None,
        tokens=Rate(limits.tokens_per_minute, limits.burst_s) if limits.tokens_per_minute else None,
        concurrency=limits.concurrency,
    )
    return None if quota == Quota() else quota
