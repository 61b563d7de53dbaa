"""The pipelines of a gateway: those in force, their runs, and what is counted of their steps.

A pipeline is a route without pools, so who may ask for it is said as of any model; whoever may, may use the models of
its steps through it. Belongs to the event loop.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from penstock.core.config import nearest
from penstock.core.errors import ConfigError, EngineUnavailable, ModelNotFound, PenstockError
from penstock.gateway.pipelines.checker import check_models
from penstock.gateway.pipelines.graph import Pipeline, PythonStep
from penstock.gateway.pipelines.input import read_input
from penstock.gateway.pipelines.model_call import StepExchange
from penstock.gateway.pipelines.python_pool import PythonPool
from penstock.gateway.pipelines.reader import PYTHON_TIMEOUT_S
from penstock.gateway.pipelines.run import PipelineRun, PythonCall, RunServices
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.request_view import SURFACES
from penstock.gateway.proxy.routed_request import Arrival
from penstock.gateway.records.facts import RequestFacts
from penstock.observe import gateway_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Labels
from penstock.router.learning import DecayingMean
from penstock.router.routes import Route, RouteTable
from penstock.tenancy.keys import Caller
from penstock.tenancy.tenants import Limits, Tenant
from penstock.tenancy.usage import Recorder

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway

_MAX_TENANTS = 1000


class _StepPool(NamedTuple):
    version: object  # of what its processes have loaded
    pool: PythonPool


def _version_of(step: PythonStep) -> object:
    """Changes with the operator's file, and with all that is said of the step."""
    with contextlib.suppress(OSError):
        found = step.entry.file.stat()
        return step.entry, step.limits, found.st_mtime_ns, found.st_size
    return step.entry, step.limits


def with_pipelines(routes: RouteTable, pipelines: Sequence[Pipeline]) -> RouteTable:
    """The routes of models, and one for each pipeline. Raises ConfigError for a name that is taken, and for a step
    whose model there is not."""
    names: dict[str, Pipeline] = {}
    for pipeline in pipelines:
        if pipeline.name in routes or pipeline.name in names:
            other = (
                "a model or an alias"
                if pipeline.name in routes
                else f"the pipeline of {names[pipeline.name].file.path}"
            )
            with pipeline.file.located():
                raise ConfigError(f"'{pipeline.name}' is the name of {other} already", param="name")
        names[pipeline.name] = pipeline
    of_pipelines = {name for name in routes.names if routes.find(name).is_pipeline}.union(names)
    for pipeline in pipelines:
        check_models(pipeline, routes.names, of_pipelines)
    for route in routes.routes.values():
        for version in route.versions:
            if version.pipeline and version.pipeline not in names:
                hint = nearest(version.pipeline, names)
                said = f"'{version.pipeline}' is no pipeline" + (f"; did you mean '{hint}'?" if hint else "")
                raise ConfigError(said, param=f"models.{route.name}.versions.{version.name}.pipeline")
    return routes.with_routes(Route(name, is_pipeline=True) for name in names) if names else routes


class PipelineService:
    """A `StepGate`."""

    def __init__(self, pipelines: Iterable[Pipeline] = ()) -> None:
        self._pipelines = {pipeline.name: pipeline for pipeline in pipelines}
        self._open: set[PipelineRun] = set()
        self._used: dict[str, DecayingMean] = {}  # tokens of a run, by pipeline
        self._tenants: dict[str, tuple[Tenant, Tenant]] = {}  # as they are, and as their steps ask
        self._pools: dict[tuple[str, str], _StepPool] = {}  # by pipeline, and the step's place in its file
        self._gateway: Gateway | None = None

    def start(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._services = RunServices(gateway.clock, gateway.services.limiter, gateway.services.ledger, self)
        self.use(list(self._pipelines.values()))

    def use(self, pipelines: Iterable[Pipeline]) -> bool:
        """Takes pipelines for requests that come; runs that go on end as they began. Returns whether any of their files
        has changed, those of Python steps among them."""
        files = [pipeline.file.values for pipeline in self._pipelines.values()]
        self._pipelines = {pipeline.name: pipeline for pipeline in pipelines}
        has_changed = files != [pipeline.file.values for pipeline in self._pipelines.values()]
        before, self._pools = self._pools, {}
        for pipeline in self._pipelines.values():
            for step in pipeline.python_steps:
                place, version = (pipeline.name, step.where), _version_of(step)
                known = before.get(place)
                if known is not None and known.version == version:
                    del before[place]
                    self._pools[place] = known
                else:
                    has_changed = True
                    self._pools[place] = _StepPool(version, PythonPool(step, self._services.clock))
        for one in before.values():
            one.pool.retire()
        return has_changed

    def close(self) -> None:
        for one in self._pools.values():
            one.pool.close()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def description(self, name: str) -> str | None:
        """The pipeline's description in its file. None: it has none, or there is no such pipeline."""
        found = self._pipelines.get(name)
        return found.description or None if found is not None else None

    def models(self, name: str) -> list[str]:
        """Models that the steps of a pipeline ask, in their order."""
        found = self._pipelines.get(name)
        return list(found.models) if found is not None else []

    def counts(self) -> dict[Metric, dict[Labels, float]]:
        """Returns gauges: what can be seen without counting."""
        running = Counter(run.pipeline.name for run in self._open)
        calls: dict[Labels, float] = {}
        restarts: dict[Labels, float] = {}
        for name, step, pool in self.python_pools():
            calls[name, step, "running"], calls[name, step, "waiting"] = pool.num_running, pool.num_waiting
            restarts[name, step] = pool.num_restarts
        return {
            catalog.PIPELINES_OPEN: {(name,): running[name] for name in self._pipelines},
            catalog.PIPELINE_PYTHON_CALLS: calls,
            catalog.PIPELINE_PYTHON_RESTARTS: restarts,
        }

    def python_pools(self) -> list[tuple[str, str, PythonPool]]:
        """With the names of their pipelines and steps."""
        return [(name, one.pool.step.name, one.pool) for (name, _), one in self._pools.items()]

    def begin(self, arrival: Arrival, name: str, route: str, version: str = "") -> None:
        """`route`: the name that was asked for; `version`: of it, that the pipeline is. Raises what is wrong with the
        request."""
        pipeline = self._pipelines.get(name)
        if pipeline is None or arrival.caller.step_of:
            raise ModelNotFound(f"no model '{name}' for a step", param="model")
        gateway = self._gateway
        assert gateway is not None
        asked = read_input(arrival.surface.path, arrival.exchange.request.body, pipeline)
        mean = self._used.get(name)
        trace = gateway.recorder.traces.begin(arrival.exchange.request.headers, gateway.now())
        expected = round(mean.value) if mean is not None else 1
        run = PipelineRun(self._services, arrival, pipeline, asked, expected, trace, route, version)
        self._open.add(run)
        run.begin()

    # -- for runs

    def new_id(self) -> str:
        assert self._gateway is not None
        return f"{self._gateway.random.getrandbits(96):024x}"

    def step_caller(self, caller: Caller, pipeline_id: str) -> Caller:
        tenant = caller.tenant
        known = self._tenants.get(tenant.id)
        if known is None or known[0] is not tenant:  # the same object each time: much is worked out once for each
            if len(self._tenants) >= _MAX_TENANTS:
                self._tenants.clear()
            own = Limits(max_input=tenant.limits.max_input, max_output=tenant.limits.max_output)
            of_steps = replace(tenant, limits=own, models=("*",), adapters=("*",))
            known = self._tenants[tenant.id] = (tenant, of_steps)
        return replace(caller, tenant=known[1], step_of=pipeline_id)

    def ask(self, exchange: StepExchange, request_id: str, caller: Caller, ledger: Recorder) -> None:
        assert self._gateway is not None
        surface = SURFACES[exchange.request.path]
        try:
            self._gateway.enter(exchange, surface, request_id, caller, ledger)
        except PenstockError as error:
            refusals.respond(exchange, surface.convention, error, request_id)

    def call(
        self,
        pipeline: Pipeline,
        step: PythonStep,
        arguments: Mapping[str, Any],
        done: Callable[[Any, PenstockError | None], None],
    ) -> PythonCall:
        """A run that began before the configuration was read again meets the processes of now."""
        found = self._pools.get((pipeline.name, step.where))
        if found is None:
            raise EngineUnavailable("its processes are gone: the pipeline has changed", retry_after_s=1.0)
        return found.pool.call(arguments, step.policy.timeout_s or PYTHON_TIMEOUT_S, done)

    def ended(self, run: PipelineRun, facts: RequestFacts) -> None:
        assert self._gateway is not None
        self._open.discard(run)
        if run.machine.answered_by or run.machine.records:
            self._used.setdefault(run.pipeline.name, DecayingMean()).add(run.bill.tokens)
        self._gateway.recorder.pipeline_ended(facts)
