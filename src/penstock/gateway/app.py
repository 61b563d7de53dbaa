"""The gateway as an application: authentication, the route, the request's size, and its way into the proxy.

`Gateway` is called once per request by `http.server` and never waits; a request that must wait is a `ProxiedRequest`,
which is called back. It owns the admission and the replicas, and has the clock that they share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set
from functools import partial
from random import Random
from zlib import crc32

from penstock.admission.admission import Admission
from penstock.api.errors import convention_at
from penstock.api.openai.models import ModelCard
from penstock.api.responses.stored import StateAsked, read_state
from penstock.core.config import shown
from penstock.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    PenstockError,
    RequestAborted,
)
from penstock.core.replica import UNBOUNDED, ReplicaState
from penstock.core.rollout import RolloutOrder
from penstock.gateway.batches.row_gate import GatewayRows
from penstock.gateway.batches.service import BatchService
from penstock.gateway.pipelines.service import PipelineService
from penstock.gateway.proxy import public_endpoints, refusals
from penstock.gateway.proxy.admission_queue import AdmissionQueue
from penstock.gateway.proxy.answer_headers import AnswerHeaders, id_header
from penstock.gateway.proxy.body_reader import LONG_BYTES, BodyReader
from penstock.gateway.proxy.failover import Failover
from penstock.gateway.proxy.fallback import Chain
from penstock.gateway.proxy.holding import HoldingServices
from penstock.gateway.proxy.journey_shell import SizedRequest
from penstock.gateway.proxy.proxied_request import ProxiedRequest, ProxyServices
from penstock.gateway.proxy.rate_limit import ENTRY, RateLimitReservation
from penstock.gateway.proxy.request_view import (
    MAX_WAIT,
    RESPONSES,
    SURFACES,
    RequestView,
    Surface,
    expected_output,
    max_wait_s,
    prepare,
)
from penstock.gateway.proxy.routed_request import Arrival, RoutedRequest, body_for
from penstock.gateway.proxy.rule_facts import with_facts
from penstock.gateway.proxy.rule_routing import ruled
from penstock.gateway.proxy.shadow import Shadows
from penstock.gateway.proxy.stranded import WAIT_S, StrandedStreams
from penstock.gateway.proxy.tenant_access import TenantAccess, TenantAccesses
from penstock.gateway.proxy.upstream_request import UpstreamServices
from penstock.gateway.records.accounting import AccountingServices
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.replicas.following import Following
from penstock.gateway.replicas.lora_routes import LearnedAdapters
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import ReplicaSet, Subscriber
from penstock.gateway.replicas.snapshots import Snapshots
from penstock.gateway.responses.exchange import BackgroundExchange
from penstock.gateway.responses.service import PREFIX, ResponseService
from penstock.gateway.rollouts.comparisons import Comparisons
from penstock.gateway.rollouts.feedback import ACCEPTED, read_feedback
from penstock.gateway.rollouts.feedback import PATH as FEEDBACK
from penstock.gateway.rollouts.following import Rollouts
from penstock.gateway.rollouts.model_asker import ModelAsker
from penstock.gateway.rollouts.observed_request import observed, pipeline_ended
from penstock.gateway.rollouts.writer import Said
from penstock.gateway.tenant_services import TenantServices
from penstock.gateway.tokens.pools import Pools
from penstock.gateway.tokens.request_size import Size
from penstock.health.quarantine import Quarantine
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import JSON, Request
from penstock.router.request import EdgeRequest
from penstock.router.routes import Route, RouteTable
from penstock.router.rules import Facts
from penstock.router.sticky import session_bucket
from penstock.tenancy.keys import Caller
from penstock.tenancy.limits.quota import NOBODY
from penstock.tenancy.tenants import Tenant
from penstock.tenancy.usage import Recorder

_LARGE_BYTES = 16 << 10  # of a body: to read it, count it and name its blocks is no work worth speaking of


class Gateway(Subscriber):
    def __init__(
        self,
        routes: RouteTable,
        services: TenantServices,
        admission: Admission,
        recorder: GatewayRecorder | None = None,
        *,
        explains: bool = True,
        clock: TimerClock = LOOP_CLOCK,
        resume_wait_s: float = WAIT_S,
        responses: ResponseService | None = None,
        batches: BatchService | None = None,
        pipelines: PipelineService | None = None,
    ) -> None:
        """`explains`: answers say which replica they come from, and why it was picked. `responses`: None: none is
        kept, and a request that asks for that is refused by its replica. `batches`: None: there are no
        such paths. `pipelines`: None: there are none."""
        self.responses = responses
        self.batches = batches
        self.pipelines = pipelines
        self.admission = admission
        self.recorder = recorder or GatewayRecorder()
        self.prices = services.prices
        self.bodies = BodyReader()
        self.replicas, self.pools = ReplicaSet(), Pools(self.bodies.threads)
        self.rollouts = Rollouts(self.replicas, clock.now)
        self.snapshots = Snapshots(admission, clock.now)
        self._following = Following(self.replicas, admission.router.index, services.adapters)
        self.quarantine = Quarantine()
        self.random = Random()  # names requests and draws for picks: no secret hangs on it
        self.clock = clock
        self.now = clock.now
        self.tensor_pools: Set[str] = frozenset()  # whose controllers say that their models take tensors
        self._learned = LearnedAdapters()
        self.services = services
        self.stranded = StrandedStreams(self.replicas, clock, resume_wait_s, admission.hold_s)
        self.failover = Failover(admission, self.replicas, self.pools, self.stranded, clock, self.random)
        self.shadows = Shadows(self.replicas, self.pools, admission, self.recorder, clock, random=self.random)
        self.queue = AdmissionQueue(admission, clock, self.shadows.give_way)
        self.feedback: Callable[[Said], object] | None = None  # who keeps users' words; None: nobody does
        models = ModelAsker(self.replicas, self.shadows, self.random)
        self.comparisons = Comparisons(models, self.random, self.recorder.compared)
        self.rollouts.check, self.shadows.compare = self.comparisons.check, self.comparisons.compare
        self._model_asker = models
        self.recorder.pipeline_told = self._pipeline_ended
        accounting = AccountingServices(clock, self.queue, self.recorder, services.ledger, services.prices)
        self.lengths = accounting.lengths
        self._proxy = ProxyServices(
            clock=clock,
            limiter=services.limiter,
            queue=self.queue,
            holding=HoldingServices(admission, clock, self.recorder),
            headers=AnswerHeaders(self.replicas.by_id, explains=explains),
            upstream=UpstreamServices(
                clock, admission, self.replicas, self.snapshots, services.keys, self.failover, self.recorder
            ),
            failover=self.failover,
            quarantine=self.quarantine,
            accounting=accounting,
            shadows=self.shadows,
        )
        self.use(routes)
        self._started_s = int(time.time())
        for subscriber in (self.snapshots, self.pools, self._following, self):
            self.replicas.subscribe(subscriber)
        if responses is not None:
            responses.start(self._resume_response, self._has_ready_replica)
        if batches is not None:
            batches.start(GatewayRows(self, batches.busy))
            self.recorder.batch_counts = batches.counts
        if pipelines is not None:
            pipelines.start(self)
            self.recorder.pipeline_counts = pipelines.counts

    def use(self, routes: RouteTable) -> None:
        """Takes routes for requests that come, with what replicas have beside them; those that are here go on as they
        were."""
        self._configured = routes
        self.routes = self._learned.over(routes)
        self.rollouts.use(self.routes)
        self._model_asker.routes = self.routes
        self._accesses = TenantAccesses(self.routes, self.rollouts)
        self._step_accesses = TenantAccesses(self.routes, self.rollouts)
        self.pools.keep({share.pool for route in routes.routes.values() for share in route.pools})
        versions = {route.key(one): one.name for route in routes.routes.values() for one in route.versions}
        self.recorder.compare(versions)

    def follow(self, orders: Iterable[RolloutOrder]) -> None:
        """Takes the rollouts that are on, for requests that come."""
        self.rollouts.apply(orders)
        self.use(self._configured)

    def _pipeline_ended(self, facts: RequestFacts) -> None:
        """A version that is a pipeline is measured by its runs, as models are by their requests."""
        if (rollout := self.rollouts.by_route.get(facts.route)) is not None:
            tenant = self.services.tenant(facts.tenant)
            if tenant is not None and rollout.order.is_measured and not rollout.opted_out(tenant):
                pipeline_ended(rollout, facts)

    def close(self) -> None:
        self.shadows.close()
        self.comparisons.close()
        self._following.close()
        self.bodies.close()
        if self.batches is not None:
            self.batches.close()
        if self.pipelines is not None:
            self.pipelines.close()
        if self.responses is not None:
            self.responses.close()
        self.queue.close()

    # -- requests

    def body_owner(self, head: Request) -> str | None:
        """The tenant whose body is about to arrive, by its key: the headers have it. None: this path takes no body."""
        takes_body = head.path in SURFACES or head.path == FEEDBACK
        takes_body = takes_body or (self.batches is not None and BatchService.owns(head.path))
        if not takes_body or head.method != b"POST":
            return None
        return self.services.caller(head.headers).tenant.id

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        """Answers a request whose body was not read."""
        surface, request_id = SURFACES.get(exchange.request.path), self._new_id()
        if surface is None:
            refusals.respond(exchange, convention_at(exchange.request.target), error, request_id)
            return
        refusals.respond(exchange, surface.convention, error, request_id)
        self.recorder.turned_away(request_id, surface.name, error, exchange.request.headers)

    def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        surface = SURFACES.get(request.path)
        convention = surface.convention if surface is not None else convention_at(request.target)
        request_id = self._new_id()
        try:
            if surface is None and self.responses is not None and request.path.startswith(PREFIX):
                tenant_id = self.services.caller(request.headers).tenant.id
                refuse = partial(refusals.respond, exchange, convention, request_id=request_id)
                self.responses.show(exchange, JSON + id_header(request_id), tenant_id, refuse)
            elif surface is None and self.batches is not None and BatchService.owns(request.path):
                caller = self.services.caller(request.headers)
                refuse = partial(refusals.respond, exchange, convention, request_id=request_id)
                self.batches.show(exchange, JSON + id_header(request_id), caller, refuse)
            elif surface is None and request.path == FEEDBACK:
                self._take_feedback(exchange, request_id)
            elif surface is None:
                headers, now = JSON + id_header(request_id), self.now()
                can_hold = self.admission.can_hold(now)
                public_endpoints.show(
                    exchange, headers, self.replicas.values(), now, self._models, self._model, can_hold=can_hold
                )
            elif request.method != b"POST":
                raise MethodNotAllowed(f"{request.path.decode(errors='replace')} takes POST")
            else:
                self.enter(exchange, surface, request_id, self.services.caller(request.headers))
        except PenstockError as error:
            refusals.respond(exchange, convention, error, request_id)
            if surface is not None:
                self.recorder.turned_away(request_id, surface.name, error, request.headers)

    def _take_feedback(self, exchange: Exchange, request_id: str) -> None:
        """A user's word on an answer. It costs a request of its tenant's limits, and no tokens."""
        request, caller = exchange.request, self.services.caller(exchange.request.headers)
        if request.method != b"POST":
            raise MethodNotAllowed(f"{FEEDBACK.decode()} takes POST")
        if self.feedback is None:
            raise NotFound("this gateway keeps no feedback")
        said, keep, refuse = read_feedback(caller.tenant.id, request.body), self.feedback, refusals.respond
        quota = self._accesses.of(caller.tenant).quota

        def paid(error: PenstockError | None) -> None:
            if not exchange.is_open:
                return
            try:
                if error is not None:
                    raise error
                keep(said)
            except PenstockError as refused:
                refuse(exchange, convention_at(request.target), refused, request_id)
            else:
                exchange.respond(202, JSON + id_header(request_id), ACCEPTED)
            if reservation is not None:
                reservation.settle(0)

        reservation = None
        if quota is None:
            paid(None)
            return
        reservation = RateLimitReservation(
            self.services.limiter, self.clock, quota, caller.tenant.id, ENTRY, NOBODY, paid
        )
        reservation.pay()

    def enter(
        self, exchange: Exchange, surface: Surface, request_id: str, caller: Caller, ledger: Recorder | None = None
    ) -> None:
        """A caller's request on its way to `begin`. One with a large body pays for it before anything is done that
        grows with it. `ledger`: of a batch's row, or of a pipeline's step."""
        body = exchange.request.body
        accesses = self._step_accesses if caller.step_of else self._accesses
        arrival = Arrival(request_id, exchange, surface, caller, accesses.of(caller.tenant), None, ledger)
        quota = arrival.access.quota
        if quota is None or len(body) <= _LARGE_BYTES:
            try:
                self._read_body(arrival)
            except PenstockError as error:
                self._turn_away(arrival, error)
            return

        def paid(error: PenstockError | None) -> None:
            self._go_on(arrival, self._read_body, error=error)

        arrival.entry = RateLimitReservation(
            self.services.limiter, self.clock, quota, caller.tenant.id, ENTRY, crc32(body) | 1, paid
        )
        arrival.entry.pay()

    def _read_body(self, arrival: Arrival) -> None:
        path, body = arrival.surface.path, arrival.exchange.request.body
        self.quarantine.check(arrival.caller.tenant.id, path, body, self.now())
        if path == RESPONSES and self.responses is not None:
            self._work(arrival, body, partial(read_state, body), self._open_response)
        else:
            self._prepare(arrival)

    def _open_response(self, arrival: Arrival, asked: StateAsked) -> None:
        """The state that it asks for is seen to before it goes the way of all requests."""
        assert self.responses is not None
        if asked.background:
            self._route(arrival.access, asked.model)

        def opened(exchange: Exchange | None, error: PenstockError | None) -> None:
            if exchange is not None:
                arrival.exchange = exchange
            if isinstance(exchange, BackgroundExchange):
                arrival.ledger = exchange.bill
            self._go_on(arrival, self._prepare, error=error)

        self.responses.open(arrival.exchange, arrival.caller, asked, opened)

    def _has_ready_replica(self) -> bool:
        now = self.now()
        return any(replica.snapshot.state_at(now) is ReplicaState.READY for replica in self.replicas.values())

    def _resume_response(self, exchange: BackgroundExchange, key_id: str) -> bool:
        """One that another gateway has left goes the way of all requests, without its state, which is resolved."""
        tenant = self.services.tenant(exchange.key[0])
        if tenant is None or not tenant.is_active:
            return False
        access, surface = self._accesses.of(tenant), SURFACES[RESPONSES]
        arrival = Arrival(self._new_id(), exchange, surface, Caller(tenant, key_id), access, None, exchange.bill)
        self._go_on(arrival, self._prepare)
        return True

    def _prepare(self, arrival: Arrival) -> None:
        path, body = arrival.surface.path, arrival.exchange.request.body
        self._work(arrival, body, partial(prepare, path, body), self._find_route)

    def _turn_away(self, asker: Arrival | RoutedRequest, error: PenstockError) -> None:
        """Refuses a request. One that cannot be served as it is costs a request of the rate limit all the same."""
        exchange, surface, tenant = asker.exchange, asker.surface, asker.caller.tenant
        is_wrong = isinstance(error, InvalidRequest | ModelNotFound)
        if asker.entry is not None:
            asker.entry.settle(0 if is_wrong else None)
        elif is_wrong and not asker.caller.step_of and (quota := self._accesses.of(tenant).quota) is not None:
            reservation = RateLimitReservation(
                self.services.limiter, self.clock, quota, tenant.id, ENTRY, NOBODY, lambda _: reservation.settle(0)
            )
            reservation.pay()
        refusals.respond(exchange, surface.convention, error, asker.id)
        headers = exchange.request.headers
        self.recorder.turned_away(asker.id, surface.name, error, headers, tenant.id, asker.caller.key_id)

    def _find_route(self, arrival: Arrival, view: RequestView) -> None:
        tenant, exchange, access = arrival.caller.tenant, arrival.exchange, arrival.access
        route = self._route(access, view.model)
        if access.has_budget:
            self.services.budgets.check(tenant, time.time())
        random01 = self.random.random()
        bucket = session_bucket(f"{tenant.id}/{view.session}") if view.session else self.random.random()
        if route.is_pipeline and self.pipelines is not None and (target := route.target(bucket)).pipeline:
            self.pipelines.begin(arrival, target.pipeline, route.name, target.version)
            return
        hint = expected_output(exchange.request.headers)
        surface, caller, entry, ledger = arrival.surface, arrival.caller, arrival.entry, arrival.ledger
        routed = RoutedRequest(
            arrival.id, exchange, surface, caller, view, route, random01, bucket, hint, entry=entry, ledger=ledger
        )
        if route.rules is None:
            self._measure(routed, access)
        else:
            tokens = self.pools[access.routes.find(route.rules.default).target(bucket).pool].tokens

            def known(facts: Facts | None, error: PenstockError | None) -> None:
                self._go_on(routed, self._rule, access, facts, error=error)

            with_facts(route.rules, routed, tokens, self.bodies, known)

    def _rule(self, routed: RoutedRequest, access: TenantAccess, facts: Facts) -> None:
        self._measure(ruled(routed, facts, access.routes, access.models), access)

    def _measure(self, routed: RoutedRequest, access: TenantAccess) -> None:
        surface, view = routed.surface, routed.view
        if self.rollouts.by_route and (rollout := self.rollouts.find(routed.route)) is not None:
            routed.observed = observed(rollout, routed.caller.tenant, routed.bucket, routed.body)
        pool = self.pools[routed.target.pool]
        output = self.output_tokens(access.tenant, surface, view)
        make = partial(Size, pool, surface.path, routed.body, view, output, access.namespace)
        self._work(routed, routed.body, make, self._count, access)

    def _count(self, routed: RoutedRequest, access: TenantAccess, size: Size) -> None:
        limits = access.tenant.limits
        if size.is_in_doubt(limits.max_input):
            size.count(lambda error: self._go_on(routed, self._name, access, size, error=error))
        else:
            self._name(routed, access, size)

    def _name(self, routed: RoutedRequest, access: TenantAccess, size: Size) -> None:
        """Where it pays: which replica holds the prompt's beginning can then be told."""
        is_named = True
        if size.is_worth_naming and self.admission.router.goes_by_prefixes(routed.target.pool):
            is_named = size.name(
                routed.view,
                access.namespace,
                routed.target.adapter,
                lambda error: self._go_on(routed, self._let_in, access, size, error=error),
            )
        if is_named:
            self._let_in(routed, access, size)

    def _work(
        self,
        asker: Arrival | RoutedRequest,
        body: bytes,
        function: Callable[[], object],
        step: Callable[..., None],
        *arguments: object,
    ) -> None:
        """A function that takes as long as the body is large, and the next step with its result."""
        if len(body) <= LONG_BYTES:
            step(asker, *arguments, function())
        else:
            self.bodies.run(
                body, function, lambda found, error: self._go_on(asker, step, *arguments, found, error=error)
            )

    def _go_on(
        self,
        asker: Arrival | RoutedRequest,
        step: Callable[..., None],
        *arguments: object,
        error: PenstockError | None = None,
    ) -> None:
        """The next step of a request that something had to be paid, read or counted for, unless that went wrong."""
        try:
            if not asker.exchange.is_open:
                raise RequestAborted("the client went away")
            if error is not None:
                raise error
            step(asker, *arguments)
        except PenstockError as refused:
            self._turn_away(asker, refused)

    def _let_in(self, routed: RoutedRequest, access: TenantAccess, size: Size) -> None:
        size.check(access.tenant.limits.max_input)
        self._work(routed, routed.body, partial(_written, routed, size), self._send_in, access, size)

    def _send_in(self, routed: RoutedRequest, access: TenantAccess, size: Size, found: tuple[bytes, int]) -> None:
        tenant, view, route, target = access.tenant, routed.view, routed.route, routed.target
        body, fingerprint = found
        hint = routed.expected_output * size.choices if routed.expected_output is not None else None
        max_tokens = size.max_tokens
        expected = self.lengths.expected(tenant.id, target.pool, max_tokens, hint)
        max_wait = routed.exchange.request.headers.get(MAX_WAIT)
        request = EdgeRequest(
            id=routed.id,
            model=target.pool,
            prompt_tokens=size.prompt,
            max_tokens=max_tokens if size.output is not None else expected,
            expected_output=expected,
            tenant=tenant.id,
            priority=access.priority,
            session=view.session,
            deadline=None if max_wait is None else self.now() + max_wait_s(max_wait),
            random01=routed.random01,
            fingerprint=fingerprint,
            context_tokens=size.context_tokens,
            hashes=size.hashes,
            block_tokens=size.block_tokens,
            holds_cache=routed.surface.generates,
            allowed=None if tenant.watermark is None else self._own_replicas,
            adapter=target.adapter,
            version=target.version,
        )
        self.failover.retries.earn()
        chain = None
        if route.fallbacks:
            chain = Chain(access.routes, self.pools, self.admission, self.clock, routed, access.models, size.output)
        self.begin(SizedRequest(routed, request, size, body, access.quota, chain))

    def can_serve(self, name: str) -> bool:
        """Whether a request for this model, alias or version would find a replica now, or be held until there is one.
        Raises ModelNotFound."""
        return all(map(self._can_serve, self.models_behind(self.routes.find(name))))

    def _can_serve(self, route: Route) -> bool:
        admission, router, now = self.admission, self.admission.router, self.now()
        for target in route.targets():
            if target.pipeline:
                continue
            asked = EdgeRequest("", target.pool, 1, 1, adapter=target.adapter)
            usable, _ = router.usable(asked, admission.replicas(target.pool), now)
            if usable or admission.hold_s(target.pool, now):
                return True
        return False

    def models_behind(self, route: Route) -> list[Route]:
        """The routes with pools that requests for this one go to: those of a pipeline's steps in their order, the
        default of rules, or itself."""
        if route.rules is not None:
            return self.models_behind(self.routes.find(route.rules.default))
        if not route.is_pipeline:
            return [route]
        targets, pipelines = route.targets(), self.pipelines
        names = [one.pipeline for one in targets if one.pipeline]
        models = [model for name in names for model in pipelines.models(name)] if pipelines is not None else []
        itself = [route] if len(names) < len(targets) else []
        return itself + [found for model in models for found in self.models_behind(self.routes.find(model))]

    def takes_tensors(self, name: str) -> bool:
        """Whether this model, alias or version is one of tensors, by what its replicas or their controller say."""
        try:
            pools = {share.pool for share in self.routes.find(name).pools}
        except ModelNotFound:
            return False
        if not pools.isdisjoint(self.tensor_pools):
            return True
        reports = (replica.report for replica in self.replicas.values() if replica.model in pools)
        return any(report is not None and report.takes_tensors for report in reports)

    def begin(self, sized: SizedRequest) -> None:
        """Hands a request over that all is known of: to the proxy."""
        ProxiedRequest(self._proxy, sized).begin()

    def _new_id(self) -> str:
        return f"{self.random.getrandbits(96):024x}"

    def _models(self, exchange: Exchange) -> list[ModelCard]:
        """The models that whoever asks may use."""
        access = self._accesses.of(self.services.caller(exchange.request.headers).tenant)
        return [self._card(self.routes.find(name), name) for name in access.models]

    def _model(self, exchange: Exchange, name: str) -> ModelCard:
        """One of them, by its name, an alias or a version. Raises ModelNotFound."""
        access = self._accesses.of(self.services.caller(exchange.request.headers).tenant)
        return self._card(self._route(access, name), name)

    def _card(self, route: Route, name: str) -> ModelCard:
        contexts = (self.pools[share.pool].most_context for share in route.pools)
        known = max((tokens for tokens in contexts if tokens < UNBOUNDED), default=None)
        root = None if route.adapter_of else name  # where an adapter lies is its replicas' affair
        description = self.pipelines.description(name) if self.pipelines is not None else None
        return ModelCard(
            id=name,
            created=self._started_s,
            max_model_len=known,
            root=root,
            parent=route.adapter_of,
            description=description,
        )

    def route_for(self, tenant: Tenant, name: str) -> Route:
        """Raises ModelNotFound."""
        return self._route(self._accesses.of(tenant), name)

    def _route(self, access: TenantAccess, name: str) -> Route:
        """The route of a model that the tenant may use; any other does not exist for it."""
        route = access.routes.find(name, access.models)
        if route.model not in access.models:
            raise ModelNotFound(f"no model '{shown(name)}'", param="model")
        return route

    @staticmethod
    def output_tokens(tenant: Tenant, surface: Surface, view: RequestView) -> int | None:
        """The output limit of one choice; None: nobody has set one, so it is what the context leaves."""
        most, limit = tenant.limits.max_output, view.output_limit
        wanted = limit or surface.default_output
        if wanted is None:
            return most
        if most is not None and wanted > most:
            if limit is None:
                return most
            name = surface.output_field.decode()
            raise InvalidRequest(f"{name} is {wanted}; this tenant's limit is {most}", param=name)
        return wanted

    @property
    def _own_replicas(self) -> frozenset[str]:
        """Penstock's: only they watermark answers."""
        return frozenset(replica.id for replica in self.replicas.values() if replica.relays)

    # -- the replicas and the queues

    def replica_changed(self, replica: Replica) -> None:
        snapshot = replica.snapshot
        has = (snapshot.adapters | replica.loaded | replica.listed) - replica.unwanted
        # One that is gone has what it had, as far as anybody knows.
        if snapshot.state is not ReplicaState.OUT and self._learned.hear(replica.id, replica.model, has):
            self.use(self._configured)
        if self.stranded:
            self.stranded.replica_changed(replica)
        if self.queue:
            self.queue.decide()

    def replica_removed(self, replica: Replica) -> None:
        self.recorder.replica_removed(replica.model, replica.id)
        if self._learned.forget(replica.id):
            self.use(self._configured)


def _written(routed: RoutedRequest, size: Size) -> tuple[bytes, int]:
    """The request as its replicas are sent it, and a number that tells it from others."""
    body = body_for(routed, size, routed.target.adapter)
    return body, crc32(body) | 1
