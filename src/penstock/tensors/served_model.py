"""Models that are served: each version has a batcher and instances, and answers requests from the event loop.

    infer ──▶ signature ──▶ batcher ──▶ an idle instance's thread ──▶ the request's future

The loop decides and the threads compute. A client that goes away takes its request out of the queue; what an instance
has begun it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.core.config import shown
from penstock.core.errors import EngineUnavailable, ModelNotFound, Overloaded, PenstockError
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.tensors.batcher import Batch, Batcher, BatchingRules, Waiting
from penstock.tensors.datatypes import Array
from penstock.tensors.instances import Execution, Instance, Outcome, Part
from penstock.tensors.model_settings import ModelSettings
from penstock.tensors.signature import Signature
from penstock.tensors.statistics import Statistics

if TYPE_CHECKING:
    from penstock.tensors.text_model import VersionTexts

Answer = dict[str, Array]


class Timer(Protocol):
    def cancel(self) -> None: ...


class Observer(Protocol):
    """Observer that is told of each execution and each request, for metrics."""

    def executed(self, version: ServedVersion, size: int, execution: Execution) -> None: ...

    def ended(self, version: ServedVersion, size: int, queue_s: float, outcome: str) -> None: ...


class Timed(NamedTuple):
    outputs: Answer
    device_s: float  # its share of its batch's time


@dataclass(eq=False)
class _Request:
    part: Part
    future: asyncio.Future[Timed]


class Inference(NamedTuple):
    """A request for tensors."""

    inputs: Mapping[str, Array]
    outputs: Sequence[str] = ()  # none: all
    priority: int = 0
    timeout_s: float | None = None


class ServedVersion:
    def __init__(
        self,
        name: str,
        version: int,
        settings: ModelSettings,
        signature: Signature,
        rules: BatchingRules,
        instances: Sequence[Instance],
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        clock: TimerClock = LOOP_CLOCK,
        observer: Observer | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.settings = settings
        self.signature = signature
        self.labels = labels or {}  # of classes, by output
        self.statistics = Statistics()
        self.num_open = 0  # requests that wait or are computed
        self.row_s = 0.0  # that a row has taken of late, on one instance
        self.instances = tuple(instances)
        self._batcher: Batcher[_Request] = Batcher(rules)
        self._idle = deque(instances)
        self._outputs = tuple(spec.name for spec in signature.outputs)
        self._clock = clock
        self._observer = observer
        self._timer: Timer | None = None
        self._timer_s: float | None = None  # when it is to look again
        self._is_dispatching = False  # it will look before the loop waits again
        self._is_stopped = False
        self._idle_again: asyncio.Future[None] | None = None  # somebody waits until nothing is open
        self._loop = asyncio.get_running_loop()

    @property
    def num_waiting(self) -> int:
        return len(self._batcher)

    @property
    def is_alive(self) -> bool:
        return all(instance.is_alive for instance in self.instances)

    @property
    def rules(self) -> BatchingRules:
        return self._batcher.rules

    async def infer(self, asked: Inference) -> Answer:
        """The outputs that are wanted, by name. Raises InvalidRequest, Overloaded, EngineFailed."""
        return (await self.compute(asked)).outputs

    async def compute(self, asked: Inference) -> Timed:
        """The same, and what it took."""
        if self._is_stopped:
            raise EngineUnavailable("this model is being unloaded", retry_after_s=1.0)
        checked = self.signature.check(asked.inputs)
        outputs = tuple(asked.outputs) or self._outputs
        request = _Request(Part(asked.inputs, checked.size, outputs), self._loop.create_future())
        began_s = self._clock.now()
        add = partial(
            self._batcher.add,
            request,
            began_s,
            size=checked.size,
            key=checked.key,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            num_bytes=checked.num_bytes,
        )
        try:
            try:
                waiting = add()
            except Overloaded:
                if not self._is_dispatching:
                    raise
                self._dispatch()  # what is in the queue need not be
                waiting = add()
        except Overloaded as error:
            error.retry_after_s = self._wait_s()
            self._ended(checked.size, began_s, error)
            raise
        self.num_open += 1
        if self._idle or waiting.deadline_s is not None:
            self._dispatch_soon()
        try:
            return await request.future
        finally:
            self.num_open -= 1
            self._batcher.remove(waiting)
            if not self.num_open and self._idle_again is not None and not self._idle_again.done():
                self._idle_again.set_result(None)

    async def retire(self) -> None:
        """Answers all that it has, and ends. Nobody finds it any more."""
        if self.num_open:
            self._idle_again = self._loop.create_future()
            await self._idle_again
        self.stop()

    def stop(self) -> None:
        """Takes no more requests; those that wait are refused."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        while (batch := self._batcher.take(float("inf"))) is not None:
            for one in batch.requests:
                self._refuse(one, EngineUnavailable("this model is being unloaded", retry_after_s=1.0))
        for instance in self.instances:
            instance.stop()

    # -- inside

    def _dispatch_soon(self) -> None:
        """Dispatches once all that has arrived by now is in the queue: it may go together."""
        if not self._is_dispatching:
            self._is_dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Gives idle instances the batches that are due, and looks again when the next one is."""
        self._is_dispatching = False
        now_s = self._clock.now()
        for one in self._batcher.expire(now_s):
            said = f"it waited {now_s - one.arrived_s:.3f} s, longer than it may"
            self._refuse(one, Overloaded(said, reason="queue_timeout", retry_after_s=self._wait_s()))
        while self._idle and (batch := self._batcher.take(now_s)) is not None:
            instance = self._idle.popleft()
            if instance.is_quick:
                self._settle(instance, batch, now_s, instance.execute_here(_parts(batch)))
                if len(self._batcher):
                    self._dispatch_soon()  # after whoever else waits for the loop
                break
            self._start(instance, batch, now_s)
        self._set_timer()

    def _set_timer(self) -> None:
        next_s = None
        if len(self._batcher) and not self._is_stopped:
            next_s = self._batcher.next_change_s(is_busy=not self._idle)
        if next_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, next_s
        if next_s is not None:
            self._timer = self._clock.call_later(max(0.0, next_s - self._clock.now()), self._look_again)

    def _look_again(self) -> None:
        self._timer = self._timer_s = None
        self._dispatch()

    def _start(self, instance: Instance, batch: Batch[_Request], now_s: float) -> None:
        def done(execution: Execution) -> None:
            self._loop.call_soon_threadsafe(self._done, instance, batch, now_s, execution)

        instance.execute(_parts(batch), done)

    def _done(self, instance: Instance, batch: Batch[_Request], began_s: float, execution: Execution) -> None:
        self._settle(instance, batch, began_s, execution)
        self._dispatch()

    def _settle(self, instance: Instance, batch: Batch[_Request], began_s: float, execution: Execution) -> None:
        self._idle.append(instance)
        now_s, unix_s = self._clock.now(), time.time()
        self.row_s += 0.2 * ((now_s - began_s) / batch.size - self.row_s) if self.row_s else now_s - began_s
        self.statistics.executed(batch.size, len(batch.requests), execution.times)
        if self._observer is not None:
            self._observer.executed(self, batch.size, execution)
        for one, outcome in zip(batch.requests, execution.outcomes, strict=True):
            self._answer(one, outcome, batch.size, began_s, now_s, unix_s)

    def _answer(
        self,
        one: Waiting[_Request],
        outcome: Outcome,
        batch_size: int,
        began_s: float,
        now_s: float,
        unix_s: float,
    ) -> None:
        future = one.payload.future
        error = outcome if isinstance(outcome, PenstockError) else None
        if error is not None:
            self.statistics.failed(now_s - one.arrived_s)
        else:
            self.statistics.answered(one.size, began_s - one.arrived_s, now_s - one.arrived_s, unix_s)
        if self._observer is not None:
            self._observer.ended(self, one.size, began_s - one.arrived_s, error.code if error is not None else "ok")
        if future.done():  # its client went away
            return
        if isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(Timed(outcome, (now_s - began_s) * one.size / batch_size))

    def _refuse(self, one: Waiting[_Request], error: PenstockError) -> None:
        self._ended(one.size, one.arrived_s, error)
        if not one.payload.future.done():
            one.payload.future.set_exception(error)

    def _ended(self, size: int, arrived_s: float, error: PenstockError) -> None:
        waited_s = self._clock.now() - arrived_s
        self.statistics.refused(waited_s)
        if self._observer is not None:
            self._observer.ended(self, size, waited_s, error.reason or error.code)

    def _wait_s(self) -> float:
        """Seconds that the waiting rows will take, by those of late; one at least."""
        return max(1.0, self.row_s * self._batcher.num_rows / max(1, len(self.instances)))


def _parts(batch: Batch[_Request]) -> list[Part]:
    return [one.payload.part for one in batch.requests]


class ServedModel:
    """A model by its name, with the versions that are served."""

    def __init__(
        self, name: str, versions: Mapping[int, ServedVersion], texts: VersionTexts | str = "it takes tensors alone"
    ) -> None:
        """`texts`: what reads texts for the latest version; or why nothing does."""
        self.name = name
        self.versions = dict(sorted(versions.items()))
        self.texts = texts

    @property
    def latest(self) -> ServedVersion:
        return self.versions[max(self.versions)]

    @property
    def num_open(self) -> int:
        return sum(one.num_open for one in self.versions.values())

    def find(self, version: str = "") -> ServedVersion:
        """A version by its number; none: the latest. Raises ModelNotFound."""
        if not version:
            return self.latest
        found = self.versions.get(int(version)) if version.isdecimal() and len(version) < 10 else None
        if found is None:
            has = ", ".join(map(str, self.versions))
            raise ModelNotFound(f"'{self.name}' has no version '{shown(version)}'; it has {has}", param="version")
        return found

    def metadata(self, version: str = "") -> dict[str, Any]:
        found = self.find(version)
        signature = found.signature
        return {
            "name": self.name,
            "versions": [str(number) for number in self.versions],
            "platform": "onnxruntime_onnx",
            "inputs": [
                {"name": one.name, "datatype": one.datatype, "shape": one.shape(signature.max_batch_size)}
                for one in signature.inputs
            ],
            "outputs": [
                {"name": one.name, "datatype": one.datatype, "shape": one.shape(signature.max_batch_size)}
                for one in signature.outputs
            ],
        }

    async def retire(self) -> None:
        """Answers all that it has, and ends."""
        await asyncio.gather(*(version.retire() for version in self.versions.values()))

    def stop(self) -> None:
        for version in self.versions.values():
            version.stop()
