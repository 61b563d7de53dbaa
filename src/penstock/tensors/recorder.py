"""Numbers and log lines of a replica whose model takes tensors. Belongs to the event loop's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from penstock.api.errors import OPENAI, Convention
from penstock.core.clock import Clock
from penstock.core.errors import PenstockError
from penstock.observe import catalog
from penstock.observe import tensor_catalog as tensors
from penstock.observe.registry import Counter, Histogram, Registry
from penstock.server.recorder import Finished, Record
from penstock.tensors.instances import Execution
from penstock.tensors.served_model import ServedModel, ServedVersion

log = logging.getLogger("penstock.request")

_Labels = tuple[str, str]


class _Series:
    """Series of one version; looked up once."""

    def __init__(self, registry: Registry, labels: _Labels) -> None:
        self.rows, self.executions = (
            registry.count(metric, *labels) for metric in (tensors.TENSOR_ROWS, tensors.TENSOR_EXECUTIONS)
        )
        self.sizes, self.queue, self.compute = (
            registry.spread(metric, *labels)
            for metric in (tensors.TENSOR_BATCH_SIZE, tensors.TENSOR_QUEUE, tensors.TENSOR_COMPUTE)
        )
        self.outcomes: dict[str, Counter] = {}


class RecordedRequest(AbstractContextManager[Record]):
    """One request, from the beginning of the context to its end: how it ends is told by the error that leaves it."""

    __slots__ = ("_began_s", "_convention", "_recorder", "id", "model", "record", "route")

    def __init__(self, recorder: TensorRecorder, route: str, id: str, convention: Convention, model: str) -> None:
        self.route = route
        self.id = id
        self.model = model
        self.record = Record()
        self._recorder = recorder
        self._convention = convention

    def __enter__(self) -> Record:
        self._began_s = self._recorder.begin()
        return self.record

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        status, outcome = 500, "cancelled"
        if error is None:
            status, outcome = 200, "ok"
        elif isinstance(error, PenstockError):
            status, outcome = self._convention.status(error), error.code
        elif isinstance(error, Exception):
            outcome = PenstockError.code
        self._recorder.end(self, status, outcome, self._began_s)


class TensorRecorder:
    """An `Observer` of versions, and the record of requests."""

    def __init__(self, clock: Clock, name: str) -> None:
        """`name`: of the replica, for requests that come to no model."""
        self._name = name
        self.registry = Registry(tensors.TENSOR_CATALOG)
        self.listeners: list[Callable[[Finished], None]] = []  # told of each request at its end
        self._clock = clock
        self._num_told = 0  # requests, to listeners
        self._open = self.registry.count(catalog.REQUESTS_OPEN)
        self._latency: dict[str, Histogram] = {}
        self._requests: dict[tuple[str, str], Counter] = {}
        self._series: dict[_Labels, _Series] = {}

    # -- batches

    def executed(self, version: ServedVersion, size: int, execution: Execution) -> None:
        series = self._of(version)
        series.executions.value += execution.num_runs
        series.rows.value += size
        series.sizes.observe(size)
        series.compute.observe(execution.times.infer_s)

    def ended(self, version: ServedVersion, size: int, queue_s: float, outcome: str) -> None:
        series = self._of(version)
        series.queue.observe(queue_s)
        count = series.outcomes.get(outcome)
        if count is None:
            labels = (version.name, str(version.version), outcome)
            count = series.outcomes[outcome] = self.registry.count(tensors.TENSOR_REQUESTS, *labels)
        count.value += 1

    def _of(self, version: ServedVersion) -> _Series:
        labels = version.name, str(version.version)
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = _Series(self.registry, labels)
        return found

    # -- requests

    def request(
        self, route: str, request_id: str = "", convention: Convention = OPENAI, model: str = ""
    ) -> RecordedRequest:
        """`model`: of tensors; of texts the record says it."""
        return RecordedRequest(self, route, request_id, convention, model)

    def begin(self) -> float:
        """A request begins: the time is for its end."""
        self._open.value += 1
        return self._clock.now()

    def end(self, request: RecordedRequest, status: int, outcome: str, began_s: float) -> None:
        self._open.value -= 1
        self._ended(request.route, status, outcome).value += 1
        took_s = self._clock.now() - began_s
        model, num_tokens = request.model, 0
        if (texts := request.record.texts) is not None:
            model, num_tokens = texts.model, texts.num_tokens
            if outcome == "ok":
                self.registry.count(catalog.EMBEDDED_TEXTS, model).value += texts.num_texts
                self.registry.count(catalog.EMBEDDED_TOKENS, model).value += num_tokens
        model = model or self._name
        spread = self._latency.get(model)
        if spread is None:
            spread = self._latency[model] = self.registry.spread(catalog.REQUEST_LATENCY, model)
        spread.observe(took_s)
        for listener in self.listeners:
            self._num_told += 1
            id_ = request.id or f"{request.route}-{self._num_told}"  # clients need not name theirs
            listener(Finished(id_, model, request.route, status, outcome, took_s, prompt_tokens=num_tokens))
        # There may be thousands in a second: a line for each that ends well would cost as much as its answer.
        level = logging.DEBUG if outcome == "ok" and texts is None else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "id=%s route=%s outcome=%s total_ms=%.1f",
                request.id or "-",
                request.route,
                outcome,
                1e3 * took_s,
            )

    def _ended(self, route: str, status: int, outcome: str) -> Counter:
        found = self._requests.get((route, outcome))
        if found is None:
            found = self._requests[route, outcome] = self.registry.count(catalog.REQUESTS, route, str(status), outcome)
        return found

    def exposition(self, models: Iterable[ServedModel], startup_s: Mapping[str, float], *, is_ready: bool) -> bytes:
        """Prometheus' text of how things stand now."""
        registry = self.registry
        registry.count(catalog.ENGINE_READY).value = float(is_ready)
        registry.replace(catalog.STARTUP, {(phase,): seconds for phase, seconds in startup_s.items()})
        waiting: dict[tuple[str, ...], float] = {}
        instances: dict[tuple[str, ...], float] = {}
        for one in (version for model in models for version in model.versions.values()):
            labels = one.name, str(one.version)
            waiting[labels] = one.num_waiting
            for instance in one.instances:
                of_device = (*labels, instance.device)
                instances[of_device] = instances.get(of_device, 0) + 1
        registry.replace(tensors.TENSOR_WAITING, waiting)
        registry.replace(tensors.TENSOR_INSTANCES, instances)
        return registry.exposition()
