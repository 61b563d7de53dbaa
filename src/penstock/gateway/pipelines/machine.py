"""One run of a pipeline as a state machine: events in, actions out, and one end. It does no I/O and reads no clock; a
timer is an event, and every event brings the time.

A run of a step is made of attempts: one, and as many more as its policy allows. An attempt ends once: its result came,
it failed, or its time was over; what comes of it later is not heard. When all attempts have failed the fallback runs,
if there is one. A step with steps inside (block, branch, parallel, map) has runs of those instead of work of its own.

The answer of the last step may go to the client while it is made: such work is `is_answer`. Once its first part was
passed on (`began`) nothing is tried again and nothing falls back: what fails then ends the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.core.errors import PenstockError, StepFailed, StepTimeout
from penstock.gateway.pipelines.calls import Call, call_of
from penstock.gateway.pipelines.edges import value_at
from penstock.gateway.pipelines.graph import (
    INDEX,
    ITEM,
    BlockStep,
    BranchStep,
    MapStep,
    ModelStep,
    ParallelStep,
    Pipeline,
    PythonStep,
    Step,
    TemplateStep,
    ValueStep,
)
from penstock.gateway.pipelines.types import as_text, read_value

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_FIRST_ID = 1
MAX_BYTES = 64 << 20  # of all results of one run
_NAMED = ("step '", "the pipeline: ")  # what errors begin with that say where they are from

Values = Mapping[str, Any]


class Failure(NamedTuple):
    error: PenstockError
    may_retry: bool = True  # another attempt may do better
    may_fall_back: bool = True  # the fallback may; not where the whole is refused, as by a spent budget


class AttemptRecord(NamedTuple):
    """An attempt at a step that is over."""

    attempt: int
    parent: int  # the attempt at the step that it is inside of; 0: the pipeline
    step: Step
    number: int  # 1: the first attempt of its run
    began: float
    ended: float
    outcome: str  # ok, failed, timeout, cancelled
    reason: str = ""
    is_fallback: bool = False


class Action(msgspec.Struct, frozen=True):
    pass


class Start(Action, frozen=True):
    """Begins work, which is answered with `done` or `failed`."""

    attempt: int
    call: Call


class Stop(Action, frozen=True):
    """Nobody wants that work any more."""

    attempt: int


class SetTimer(Action, frozen=True):
    """Has `timer_fired` called after a time."""

    timer: int
    after_s: float


class CancelTimer(Action, frozen=True):
    timer: int


class Answer(Action, frozen=True):
    """The end: the value of the output."""

    value: Any


class Fail(Action, frozen=True):
    """The end: there is none."""

    error: PenstockError


Actions = list[Action]


class Machine:
    def __init__(self, pipeline: Pipeline, values: Values) -> None:
        """`values`: of the pipeline's input."""
        self.pipeline = pipeline
        self.is_over = False
        self.is_begun = False  # the client has a part of the answer
        self.answered_by = 0  # the attempt whose result is the answer, as it came; 0: none
        self.records: list[AttemptRecord] = []
        self.now = 0.0
        self._num_bytes = 0  # of results so far
        self._actions: Actions = []
        self._todo: deque[Callable[[], None]] = deque()  # instead of calls in calls, which a long map would nest deeply
        self._attempts: dict[int, _Run] = {}  # that go on
        self._timers: dict[int, Callable[[], None]] = {}
        self._next_id = _FIRST_ID
        self._root = _Run(self, pipeline.root, {"input": values}, None, is_answer=True)

    @property
    def root_attempt(self) -> int:
        """Number of the attempt at the whole, inside of which are those at the outermost steps."""
        return _FIRST_ID

    # -- in

    def begin(self, now: float) -> Actions:
        return self._run(now, self._root.start)

    def began(self, attempt: int, now: float) -> Actions:
        """The first part of the answer that this attempt makes was passed on to the client."""
        run = self._attempts.get(attempt)
        if run is not None and run.is_answer:
            self.is_begun = True
        return self._run(now)

    def done(self, attempt: int, value: Any, now: float, num_bytes: int = 0) -> Actions:
        """The plain result of work that was started; it is checked here."""
        run = self._attempts.get(attempt)
        return self._run(now, lambda: run.work_done(value, num_bytes)) if run is not None else []

    def failed(self, attempt: int, failure: Failure, now: float) -> Actions:
        run = self._attempts.get(attempt)
        return self._run(now, lambda: run.work_failed(failure)) if run is not None else []

    def timer_fired(self, timer: int, now: float) -> Actions:
        due = self._timers.pop(timer, None)
        return self._run(now, due) if due is not None else []

    def cancel(self, now: float) -> Actions:
        """The client has gone: everything stops, and there is no answer."""
        return self._run(now, self._stop_all)

    # -- for runs

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def later(self, todo: Callable[[], None]) -> None:
        self._todo.append(todo)

    def keep(self, num_bytes: int) -> None:
        """A result of this size. Raises StepFailed where those of a run come to too much."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_BYTES:
            raise StepFailed(f"the results of all steps are larger than {MAX_BYTES >> 20} MiB", reason="too_large")

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def set_timer(self, after_s: float, then: Callable[[], None]) -> int:
        timer = self.new_id()
        self._timers[timer] = then
        self.act(SetTimer(timer, after_s))
        return timer

    def cancel_timer(self, timer: int | None) -> None:
        if timer is not None and self._timers.pop(timer, None) is not None:
            self.act(CancelTimer(timer))

    def opened(self, attempt: int, run: _Run) -> None:
        self._attempts[attempt] = run

    def closed(self, attempt: int, record: AttemptRecord) -> None:
        self._attempts.pop(attempt, None)
        self.records.append(record)

    def ended(self, run: _Run, value: Any, failure: Failure | None) -> None:
        """A run without a parent is over."""
        self._stop_all()
        self.is_over = True
        self.act(Answer(value) if failure is None else Fail(failure.error))

    # -- inside

    def _run(self, now: float, event: Callable[[], None] | None = None) -> Actions:
        if self.is_over:
            return []
        self.now = max(self.now, now)
        if event is not None:
            self._todo.append(event)
        while self._todo and not self.is_over:
            self._todo.popleft()()
        if self.is_over:
            self._todo.clear()
        actions, self._actions = self._actions, []
        return actions

    def _stop_all(self) -> None:
        self._root.stop()
        self.is_over = True
        for timer in list(self._timers):
            self.cancel_timer(timer)


class _Run:
    """One run of one step: its attempts, and the runs inside the present one."""

    def __init__(
        self,
        machine: Machine,
        step: Step,
        scope: Values,
        parent: _Run | None,
        *,
        key: Any = None,
        is_answer: bool = False,
        is_fallback: bool = False,
    ) -> None:
        """`key`: what it is to its parent."""
        self.step = step
        self.key = key
        self.is_answer = is_answer  # its result is the answer, as it is
        self._machine = machine
        self._scope = scope
        self._parent = parent
        self._is_fallback = is_fallback
        self._attempt = 0  # 0: none goes on
        self._parent_attempt = parent._attempt if parent is not None else 0
        self._number = 0
        self._began = 0.0
        self._timer: int | None = None
        self._has_work = False  # of its own, outside
        self._children: list[_Run] = []
        self._waiting: deque[_Run] = deque()  # children of a map that have no place yet
        self._results: dict[Any, Any] = {}
        self._is_over = False

    def start(self) -> None:
        """The next attempt."""
        if self._is_over:
            return
        machine, step = self._machine, self.step
        self._number += 1
        self._attempt, self._began = machine.new_id(), machine.now
        self._children, self._waiting, self._results = [], deque(), {}
        machine.opened(self._attempt, self)
        if step.policy.timeout_s is not None:
            self._timer = machine.set_timer(step.policy.timeout_s, self._timed_out)
        try:
            _START[type(step)](self)
        except PenstockError as error:
            self.fail(Failure(error, may_retry=False))

    def stop(self) -> None:
        """It is not wanted any more, whatever it is at."""
        if self._is_over:
            return
        self._is_over = True
        self._machine.cancel_timer(self._timer)
        self._close("cancelled")

    # -- what comes of an attempt

    def work_done(self, value: Any, num_bytes: int) -> None:
        """A plain result from outside."""
        try:
            self._machine.keep(num_bytes)
        except StepFailed as error:
            self.work_failed(Failure(error, may_retry=False, may_fall_back=False))
            return
        found, problem = read_value(value, self._machine.pipeline.kinds[self.step.where])
        self._has_work = False
        if problem is not None:
            self.fail(Failure(StepFailed(f"its result is not what it declares: {problem}", reason="wrong_result")))
        else:
            if self.is_answer:
                self._machine.answered_by = self._attempt
            self._succeed(found)

    def work_failed(self, failure: Failure) -> None:
        self._has_work = False
        self.fail(failure)

    def fail(self, failure: Failure, outcome: str = "failed") -> None:
        """The present attempt failed."""
        if self._is_over or not self._attempt:
            return
        machine, policy = self._machine, self.step.policy
        failure = failure._replace(error=self._named(failure.error))
        machine.cancel_timer(self._timer)
        self._close(outcome, failure.error.reason or failure.error.code)
        if machine.is_begun:
            self._end(None, failure)
        elif failure.may_retry and self._number <= policy.retries:
            asked_s = failure.error.retry_after_s or 0.0
            pause_s = min(max(_FIRST_BACKOFF_S * 2 ** (self._number - 1), asked_s), _MAX_BACKOFF_S)
            self._timer = machine.set_timer(pause_s, self.start)
        elif failure.may_fall_back and policy.fallback is not None:
            self._fall_back(policy.fallback)
        else:
            self._end(None, failure)

    def _succeed(self, value: Any) -> None:
        if self._is_over or not self._attempt:
            return
        self._machine.cancel_timer(self._timer)
        self._close("ok")
        self._end(value, None)

    def _timed_out(self) -> None:
        timeout_s = self.step.policy.timeout_s
        error = StepTimeout(f"it took longer than {timeout_s:g} s", reason="timeout")
        self.fail(Failure(error), outcome="timeout")

    def _fall_back(self, fallback: Step) -> None:
        self._children = [_Run(self._machine, fallback, self._scope, self, is_answer=self.is_answer, is_fallback=True)]
        self._children[0]._parent_attempt = self._parent_attempt
        self._machine.later(self._children[0].start)

    def _end(self, value: Any, failure: Failure | None) -> None:
        self._is_over = True
        parent = self._parent
        if parent is None:
            self._machine.ended(self, value, failure)
        else:
            self._machine.later(lambda: parent.child_ended(self, value, failure))

    def _close(self, outcome: str, reason: str = "") -> None:
        """Ends the present attempt, and all that goes on inside it."""
        for child in self._children:
            child.stop()
        machine = self._machine
        attempt, self._attempt = self._attempt, 0
        if not attempt:
            return
        if self._has_work and outcome != "ok":
            machine.act(Stop(attempt))
        self._has_work = False
        record = AttemptRecord(
            attempt,
            self._parent_attempt,
            self.step,
            self._number,
            self._began,
            machine.now,
            outcome,
            reason,
            self._is_fallback,
        )
        machine.closed(attempt, record)

    # -- what is inside

    def child_ended(self, child: _Run, value: Any, failure: Failure | None) -> None:
        if self._is_over or child not in self._children:
            return
        if child._is_fallback:
            self._end(value, failure)
        elif failure is not None:
            self.fail(failure)
        else:
            self._results[child.key] = value
            _GO_ON[type(self.step)](self, child)

    def _child(self, step: Step, key: Any, scope: Values, *, is_answer: bool = False) -> None:
        child = _Run(self._machine, step, scope, self, key=key, is_answer=is_answer)
        self._children.append(child)
        self._machine.later(child.start)

    def _named(self, error: PenstockError) -> PenstockError:
        """The error, which says what step it is of."""
        if error.message.startswith(_NAMED):
            return error
        what = f"step '{self.step.name}'" if self.step.name else "the pipeline"
        said = f"{what}: {error.message}"
        return type(error)(said, param=error.param, reason=error.reason, retry_after_s=error.retry_after_s)

    # -- by kind

    def _start_call(self) -> None:
        assert isinstance(self.step, ModelStep | PythonStep)
        passes_on = self.is_answer and isinstance(self.step, ModelStep) and self.step.task.generates
        call = call_of(self.step, self._scope, is_answer=passes_on)
        self._has_work = True
        self._machine.act(Start(self._attempt, call))

    def _start_template(self) -> None:
        assert isinstance(self.step, TemplateStep)
        text = self.step.template.render(self._scope)
        self._machine.keep(len(text))
        self._succeed(text)

    def _start_constant(self) -> None:
        assert isinstance(self.step, ValueStep)
        self._succeed(self.step.value)

    def _start_block(self) -> None:
        self._next_of_block(0)

    def _go_on_block(self, child: _Run) -> None:
        self._next_of_block(child.key + 1)

    def _next_of_block(self, index: int) -> None:
        block = self.step
        assert isinstance(block, BlockStep)
        named = {block.names[key]: value for key, value in self._results.items()}
        if index == len(block.steps):
            self._succeed(named[block.result])
            return
        is_last = index == len(block.steps) - 1 and block.names[index] == block.result
        scope = dict(self._scope) | named
        self._child(block.steps[index], index, scope, is_answer=self.is_answer and is_last)

    def _start_branch(self) -> None:
        branch = self.step
        assert isinstance(branch, BranchStep)
        case = as_text(value_at(branch.on, self._scope))
        chosen = branch.cases.get(case, branch.default)
        if chosen is None:
            raise StepFailed(f"there is no case for '{case[:80]}'", reason="no_case")
        self._child(chosen, case, self._scope, is_answer=self.is_answer)

    def _go_on_branch(self, child: _Run) -> None:
        self._succeed(self._results[child.key])

    def _start_parallel(self) -> None:
        assert isinstance(self.step, ParallelStep)
        for name, arm in self.step.arms.items():
            self._child(arm, name, self._scope)

    def _go_on_parallel(self, _: _Run) -> None:
        assert isinstance(self.step, ParallelStep)
        if len(self._results) == len(self.step.arms):
            self._succeed({name: self._results[name] for name in self.step.arms})

    def _start_map(self) -> None:
        step = self.step
        assert isinstance(step, MapStep)
        assert step.step is not None
        items = value_at(step.over, self._scope)
        if not isinstance(items, list | tuple):
            raise StepFailed(f"'{step.over}' is no list", reason="no_list")
        if len(items) > step.max_items:
            said = f"'{step.over}' has {len(items)} elements, more than {step.max_items}"
            raise StepFailed(said, reason="too_many_items")
        for index, item in enumerate(items):
            scope = dict(self._scope) | {ITEM: item, INDEX: index}
            self._waiting.append(_Run(self._machine, step.step, scope, self, key=index))
        if not items:
            self._succeed([])
            return
        for _ in range(min(step.at_once, len(items))):
            self._next_of_map()

    def _next_of_map(self) -> None:
        if self._waiting:
            child = self._waiting.popleft()
            self._children.append(child)
            self._machine.later(child.start)

    def _go_on_map(self, child: _Run) -> None:
        self._children.remove(child)
        self._next_of_map()
        if not self._children:
            self._succeed([self._results[index] for index in sorted(self._results)])


_START: dict[type[Step], Callable[[_Run], None]] = {
    ModelStep: _Run._start_call,
    PythonStep: _Run._start_call,
    TemplateStep: _Run._start_template,
    ValueStep: _Run._start_constant,
    BlockStep: _Run._start_block,
    BranchStep: _Run._start_branch,
    ParallelStep: _Run._start_parallel,
    MapStep: _Run._start_map,
}
_GO_ON: dict[type[Step], Callable[[_Run, _Run], None]] = {
    BlockStep: _Run._go_on_block,
    BranchStep: _Run._go_on_branch,
    ParallelStep: _Run._go_on_parallel,
    MapStep: _Run._go_on_map,
}
