"""One client's request for a pipeline: the shell around its machine.

It is called back from the event loop and returns at once. It does what the machine says (asks models, calls Python
processes, sets timers, writes the answer), and tells it what came of that. The whole is one request of its tenant: it
reserves once, and is settled with the tokens of all its steps, each of which is charged at its own model's price.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from msgspec.structs import replace

from penstock.api.openai.responses import Usage as WireUsage
from penstock.api.sse import error_event
from penstock.core.errors import PenstockError
from penstock.gateway.pipelines import machine as on
from penstock.gateway.pipelines.answer import PipelineAnswer, StepUse
from penstock.gateway.pipelines.calls import Call
from penstock.gateway.pipelines.graph import ModelStep, Pipeline, PythonStep
from penstock.gateway.pipelines.input import PipelineInput
from penstock.gateway.pipelines.machine import Action, Actions, AttemptRecord, Failure, Machine
from penstock.gateway.pipelines.model_call import ModelCall, StepExchange, headers_of, request_of
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.answer_headers import id_header
from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.routed_request import Arrival
from penstock.gateway.records.facts import Ending, RequestFacts, ending_of
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.records.trace import PassedOn, StepVisit, Trace
from penstock.http.clock import Timer, TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import EVENT_STREAM, JSON, by_name
from penstock.tenancy.keys import Caller
from penstock.tenancy.limits.limiter import Limiter
from penstock.tenancy.prices import NANOS
from penstock.tenancy.usage import Recorder, Usage


class StepCost(NamedTuple):
    """Usage of the requests of one attempt, as they were charged."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_nanos: int = 0


NO_COST = StepCost()


class PythonCall(Protocol):
    @property
    def num_bytes(self) -> int:
        """Those of its result."""

    def cancel(self) -> None: ...


class StepGate(Protocol):
    """The ways of a step's work out of a run."""

    def ask(self, exchange: StepExchange, request_id: str, caller: Caller, ledger: Recorder) -> None:
        """Lets a step's request in as if a client had sent it, but that its usage is told to `ledger`."""

    def step_caller(self, caller: Caller, pipeline_id: str) -> Caller: ...

    def call(
        self,
        pipeline: Pipeline,
        step: PythonStep,
        arguments: Mapping[str, Any],
        done: Callable[[Any, PenstockError | None], None],
    ) -> PythonCall:
        """Calls a step's function. `done` is told its result once, unless it is cancelled. Raises Overloaded."""

    def new_id(self) -> str: ...
    def ended(self, run: PipelineRun, facts: RequestFacts) -> None: ...


@dataclass(frozen=True)
class RunServices:
    clock: TimerClock
    limiter: Limiter
    ledger: Recorder
    gate: StepGate


class RunSize:
    """Reservation for a run: as many tokens as its pipeline's runs took lately. It is settled by what it used."""

    is_final = True

    def __init__(self, tokens: int) -> None:
        self.reserved = self.most = tokens
        self.exact: int | None = tokens

    def count(self, then: Callable[[PenstockError | None], None]) -> None:
        then(None)


class RunBill:
    """Told the usage of each step's request. It is charged at once, under the step's model, as a part of a request that
    goes on; who asked for the pipeline is charged for one request at its end."""

    def __init__(self, ledger: Recorder) -> None:
        self.costs: dict[str, StepCost] = {}  # by the id of a step's request
        self._ledger = ledger

    @property
    def tokens(self) -> int:
        return sum(one.input_tokens + one.output_tokens for one in self.costs.values())

    @property
    def cost_nanos(self) -> int:
        return sum(one.cost_nanos for one in self.costs.values())

    def record(self, usage: Usage) -> None:
        request_id = usage.request_id.partition("/")[0]
        before = self.costs.get(request_id, NO_COST)
        self.costs[request_id] = StepCost(
            before.input_tokens + usage.input_tokens,
            before.output_tokens + usage.output_tokens,
            before.cached_tokens + usage.cached_tokens,
            before.cost_nanos + usage.cost_nanos,
        )
        self._ledger.record(replace(usage, requests=0))


class PipelineRun:
    """Watches the client, and listens to the calls of steps."""

    def __init__(
        self,
        services: RunServices,
        arrival: Arrival,
        pipeline: Pipeline,
        asked: PipelineInput,
        expected_tokens: int,
        trace: Trace | PassedOn | None,
        route: str,
        version: str = "",
    ) -> None:
        """`route`: the name that was asked for; `version`: of it, that the pipeline is; empty: it has none."""
        self.pipeline = pipeline
        self.arrival = arrival
        self.machine = Machine(pipeline, asked.values)
        self.bill = RunBill(arrival.ledger or services.ledger)
        self._services = services
        self._asked = asked
        self._route = route
        self._version = version
        self._client: Exchange = arrival.exchange
        self._trace = trace
        self._caller = services.gate.step_caller(arrival.caller, arrival.id)
        self._headers = headers_of(arrival.exchange.request.headers)
        self._answer = PipelineAnswer(asked.task, route, arrival.id, int(time.time()), has_usage=asked.has_usage)
        self._began = services.clock.now()
        self._first_at: float | None = None
        self._calls: dict[int, ModelCall | PythonCall] = {}  # that go on, by attempt
        self._answering: ModelCall | None = None  # the call whose answer is the client's
        self._request_ids: dict[int, str] = {}  # of model calls, by attempt
        self._span_ids: dict[int, str] = {}  # by attempt
        self._used: dict[int, TokenUsage] = {}  # by attempt, as answers said
        self._timers: dict[int, Timer] = {}
        self._actions: deque[Action] = deque()  # that are still to be done
        self._is_acting = False
        self._reservation: RateLimitReservation | None = None
        if (quota := arrival.access.quota) is not None:
            tenant, size = arrival.caller.tenant.id, RunSize(expected_tokens)
            fingerprint = crc32(arrival.exchange.request.body) | 1
            self._reservation = RateLimitReservation(
                services.limiter, services.clock, quota, tenant, size, fingerprint, self._reserved
            )

    def begin(self) -> None:
        self._client.watcher = self
        if self.arrival.entry is not None:
            self.arrival.entry.settle(None)
        if self._reservation is None:
            self._reserved(None)
        else:
            self._reservation.pay()

    def _reserved(self, error: PenstockError | None) -> None:
        if error is not None:
            self._refuse(error)
        else:
            self._run(self.machine.begin(self._now()))

    # -- the client

    def client_gone(self) -> None:
        self._run(self.machine.cancel(self._now()))
        self._settle(Ending.CLIENT_GONE, "")

    def pause(self) -> None:
        if (watcher := self._upstream_watcher()) is not None:
            watcher.pause()

    def resume(self) -> None:
        if (watcher := self._upstream_watcher()) is not None:
            watcher.resume()

    def _upstream_watcher(self) -> Any:
        call = self._answering
        return call.exchange.watcher if call is not None and call.exchange is not None else None

    # -- what calls tell

    def passed_on(self, call: ModelCall, chunk: dict[str, Any]) -> None:
        if call.call.is_answer and self._asked.is_stream and (data := self._answer.part(chunk, call)):
            self._write(data, call)

    def finished(self, call: ModelCall, value: Any) -> None:
        self._calls.pop(call.attempt, None)
        self._add_usage(call)
        if call.call.is_answer:
            self._answering = call
        self._run(self.machine.done(call.attempt, value, self._now(), call.num_bytes))

    def failed(self, call: ModelCall, failure: Failure) -> None:
        self._calls.pop(call.attempt, None)
        self._add_usage(call)
        self._run(self.machine.failed(call.attempt, failure, self._now()))

    def _write(self, data: bytes, call: ModelCall) -> None:
        client = self._client
        if client.is_started:
            client.write(data)
            return
        self._answering = call
        self._first_at = self._now()
        self._run(self.machine.began(call.attempt, self._first_at))
        client.start(200, EVENT_STREAM + id_header(self.arrival.id), data=data)

    def _add_usage(self, call: ModelCall) -> None:
        self._used[call.attempt] = call.usage

    # -- what the machine says

    def _run(self, actions: Actions) -> None:
        """In their order, those that follow from one of them after all others."""
        self._actions.extend(actions)
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._actions:
                action = self._actions.popleft()
                _RUN[type(action)](self, action)
        finally:
            self._is_acting = False

    def _start(self, action: on.Start) -> None:
        if isinstance(action.call.step, PythonStep):
            self._start_python(action.attempt, action.call, action.call.step)
        else:
            self._start_model(action.attempt, action.call)

    def _start_model(self, attempt: int, call: Call) -> None:
        gate, trace = self._services.gate, self._trace
        headers = dict(self._headers)
        if isinstance(trace, Trace):
            headers |= by_name(trace.root.child(self._span_id(attempt)).headers())
        elif trace is not None:
            headers |= by_name(trace.sent("", self._now()))
        # A stream that is given up is charged by what was made of it, a whole answer by all that it might have become.
        generates = isinstance(call.step, ModelStep) and call.step.task.generates
        is_stream = generates and (self._asked.is_stream or not call.is_answer)
        request = request_of(call, self._asked.fields, is_stream=is_stream, headers=headers)
        request_id = self._request_ids[attempt] = gate.new_id()
        made = self._calls[attempt] = ModelCall(attempt, call, self)
        gate.ask(made.begin(request, self._client.peer), request_id, self._caller, self.bill)

    def _start_python(self, attempt: int, call: Call, step: PythonStep) -> None:
        def done(value: Any, error: PenstockError | None) -> None:
            job, now, machine = self._calls.pop(attempt, None), self._now(), self.machine
            if error is not None:
                self._run(machine.failed(attempt, Failure(error), now))
            else:
                self._run(machine.done(attempt, value, now, job.num_bytes if job is not None else 0))

        try:
            self._calls[attempt] = self._services.gate.call(self.pipeline, step, call.arguments, done)
        except PenstockError as error:
            self._run(self.machine.failed(attempt, Failure(error), self._now()))

    def _stop(self, action: on.Stop) -> None:
        call = self._calls.pop(action.attempt, None)
        if isinstance(call, ModelCall):
            self._add_usage(call)
        if call is not None:
            call.cancel()

    def _set_timer(self, action: on.SetTimer) -> None:
        def due() -> None:
            self._timers.pop(action.timer, None)
            self._run(self.machine.timer_fired(action.timer, self._now()))

        self._timers[action.timer] = self._services.clock.call_later(action.after_s, due)

    def _cancel_timer(self, action: on.CancelTimer) -> None:
        if (timer := self._timers.pop(action.timer, None)) is not None:
            timer.cancel()

    def _end(self, action: on.Answer) -> None:
        client, answer, usage = self._client, self._answer, self._usage()
        steps = self._steps_used() if self._asked.has_steps else None
        client.watcher = None
        call = self._answering
        if call is not None and call.attempt != self.machine.answered_by:
            call = None  # another step has stood in for it
        if not self._asked.is_stream:
            body = answer.whole(action.value, call, usage, steps)
            client.respond(200, JSON + id_header(self.arrival.id), body)
        elif client.is_started:
            client.write(answer.end(call, usage, steps), is_last=True)
        else:
            self._first_at = self._now()
            data = answer.value(action.value) + answer.end(None, usage, steps)
            client.start(200, EVENT_STREAM + id_header(self.arrival.id), data=data, is_last=True)
        self._settle(Ending.OK, "")

    def _usage(self) -> WireUsage:
        return _wire_usage(*map(self._used_by, self._request_ids))

    def _used_by(self, attempt: int) -> StepCost | TokenUsage:
        """Usage of an attempt as it was charged. For one that has just been answered: as the answer reports it."""
        charged = self.bill.costs.get(self._request_ids[attempt])
        return charged if charged is not None else self._used.get(attempt, NO_COST)

    def _steps_used(self) -> list[StepUse]:
        """Attempts in the order in which they began."""
        return [
            StepUse(
                one.step.name,
                one.step.kind,
                one.outcome,
                round(one.ended - one.began, 6),
                one.number,
                _wire_usage(self._used_by(one.attempt)) if one.attempt in self._request_ids else None,
            )
            for one in sorted(self._records(), key=lambda one: one.attempt)
        ]

    def _records(self) -> list[AttemptRecord]:
        return [record for record in self.machine.records if record.step is not self.pipeline.root]

    def _fail(self, action: on.Fail) -> None:
        self._refuse(action.error)

    def _refuse(self, error: PenstockError) -> None:
        client, convention, request_id = self._client, self.arrival.surface.convention, self.arrival.id
        client.watcher = None
        if client.is_started:
            client.write(error_event(error, request_id, convention), is_last=True)
        else:
            refusals.respond(client, convention, error, request_id)
        self._settle(*ending_of(error))

    # -- the end

    def _settle(self, ending: Ending, reason: str) -> None:
        """In a moment: the requests of its last steps are charged first."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._services.clock.call_later(0, self._close, ending, reason, self._now())

    def _close(self, ending: Ending, reason: str, now: float) -> None:
        services, arrival, bill = self._services, self.arrival, self.bill
        if self._reservation is not None:
            self._reservation.settle(bill.tokens if self.machine.records else None)
        caller = arrival.caller
        if ending is Ending.OK or bill.costs:
            whole = Usage(arrival.id, caller.tenant.id, caller.key_id, self._version or self.pipeline.name, time.time())
            (arrival.ledger or services.ledger).record(whole)
        costs = {attempt: bill.costs.get(id_, NO_COST) for attempt, id_ in self._request_ids.items()}
        steps = tuple(self._visit(record, costs.get(record.attempt, NO_COST)) for record in self._records())
        first_at = self._first_at if self._asked.is_stream else None
        facts = RequestFacts(
            arrival.id,
            arrival.surface.name,
            ending,
            reason,
            caller.tenant.id,
            caller.key_id,
            self.pipeline.name,
            input_tokens=sum(one.input_tokens for one in costs.values()),
            output_tokens=sum(one.output_tokens for one in costs.values()),
            cached_tokens=sum(one.cached_tokens for one in costs.values()),
            ttft_s=first_at - self._began if first_at is not None else None,
            total_s=now - self._began,
            route=self._route,
            cost=bill.cost_nanos / NANOS if bill.cost_nanos else None,
            trace=self._trace,
            is_batch=caller.is_batch,
            steps=steps,
            version=self._version,
        )
        services.gate.ended(self, facts)

    def _visit(self, record: AttemptRecord, cost: StepCost) -> StepVisit:
        step, has_spans = record.step, isinstance(self._trace, Trace)
        is_inside = record.parent != self.machine.root_attempt
        return StepVisit(
            step.name,
            step.kind,
            self._span_id(record.attempt) if has_spans else "",
            self._span_id(record.parent) if has_spans and is_inside else "",
            record.began,
            record.ended,
            record.outcome,
            record.reason,
            step.model if isinstance(step, ModelStep) else "",
            record.number,
            record.is_fallback,
            cost.input_tokens,
            cost.output_tokens,
            cost.cost_nanos / NANOS,
            self._request_ids.get(record.attempt, ""),
        )

    def _span_id(self, attempt: int) -> str:
        found = self._span_ids.get(attempt)
        if found is None:
            assert isinstance(self._trace, Trace)
            found = self._span_ids[attempt] = self._trace.new_span_id()
        return found

    def _now(self) -> float:
        return self._services.clock.now()


def _wire_usage(*used: StepCost | TokenUsage) -> WireUsage:
    """Sum of all these usages."""
    return WireUsage.of(
        sum(one.input_tokens for one in used),
        sum(one.output_tokens for one in used),
        sum(one.cached_tokens for one in used),
    )


_RUN: dict[type[Action], Callable[[PipelineRun, Any], None]] = {
    on.Start: PipelineRun._start,
    on.Stop: PipelineRun._stop,
    on.SetTimer: PipelineRun._set_timer,
    on.CancelTimer: PipelineRun._cancel_timer,
    on.Answer: PipelineRun._end,
    on.Fail: PipelineRun._fail,
}
