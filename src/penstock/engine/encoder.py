"""The engine of a model that makes vectors and nothing else: no cache, no scheduler, whole texts."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import UnsupportedTask
from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineTotals, PrefixCacheUse
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.embedding import EmbedBatch, EmbedQueue
from penstock.engine.messages import (
    Abort,
    Embed,
    FromEngine,
    Park,
    ParkAnswer,
    RebalanceAnswer,
    RebalanceExperts,
    StepFigures,
    StepReport,
    Submit,
    ToEngine,
    Wake,
)


class EncoderEngine:
    lora = None
    transfer = None
    wants_park = False

    def __init__(self, embeddings: EmbedQueue, model: str = "") -> None:
        """`model` is what messages are marked with, where several engines share a process."""
        self.embeddings = embeddings
        self.outbox: list[FromEngine] = []
        self._model = model
        self._steps = 0
        self._num_tokens = 0
        self._busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.embeddings.has_work

    def receive(self, messages: Sequence[ToEngine], now: float) -> None:
        for message in messages:
            match message:
                case Embed():
                    self.embeddings.add(message)
                case Abort(request_id):
                    self.embeddings.abort(request_id)
                case Submit(request):
                    error = "this engine generates no tokens"
                    self._report([TokenEvent(request.id, finish=FinishReason.ERROR, error=error)])
                case Park() | Wake():
                    error = "an engine that makes vectors only cannot be parked"
                    self.outbox.append(ParkAnswer(False, code=UnsupportedTask.code, message=error, model=self._model))
                case RebalanceExperts():
                    error = "an engine that makes vectors only has no experts"
                    self.outbox.append(RebalanceAnswer(code=UnsupportedTask.code, message=error, model=self._model))

    def embedded(self, batch: EmbedBatch) -> None:
        self._steps += 1
        self._num_tokens += batch.num_tokens
        self._busy_s += batch.device_s
        self.outbox += batch.answers
        self._report([], StepFigures(batch.num_tokens, batch.num_texts, cost_s=batch.device_s))

    def _report(self, events: list[TokenEvent], step: StepFigures = StepFigures()) -> None:  # noqa: B008 (frozen)
        queue = self.embeddings
        measured = EngineMeasurements(
            EngineLoad(num_waiting=queue.num_waiting, queued_tokens=queue.num_tokens, steps=self._steps),
            EngineTotals(busy_s=self._busy_s),
            PrefixCacheUse(prompt_tokens=self._num_tokens),
        )
        self.outbox.append(StepReport(events, measured, step, model=self._model))
