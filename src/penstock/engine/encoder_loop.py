"""The loop of an engine whose model makes vectors and nothing else: read the mail, compute a batch, answer."""

from __future__ import annotations

import gc
import logging

from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.embedding import Batch, EmbedQueue
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import Abort, Embed, EngineStats, StepReport, Stop, Submit
from penstock.engine.ports import Mail

log = logging.getLogger("penstock.engine")


class EncoderLoop:
    def __init__(self, queue: EmbedQueue, mailbox: Mail) -> None:
        self._queue = queue
        self._mailbox = mailbox
        self._steps = 0
        self._num_tokens = 0
        self._busy_s = 0.0

    def run(self) -> None:
        """Until told to stop, or the server is gone."""
        gc.collect()
        gc.freeze()
        try:
            while self._read_mail():
                if self._queue.has_work:
                    self._step()
        except Disconnected:
            log.info("the server is gone; the engine stops")

    def _read_mail(self) -> bool:
        for message in self._mailbox.receive(wait=not self._queue.has_work):
            match message:
                case Embed():
                    self._queue.add(message)
                case Abort(request_id):
                    self._queue.abort(request_id)
                case Submit(request):
                    error = "this engine generates no tokens"
                    event = TokenEvent(request.id, finish=FinishReason.ERROR, error=error)
                    self._mailbox.send(StepReport([event], self._stats()))
                case Stop():
                    return False
        return True

    def _step(self) -> None:
        batch = self._queue.step()
        self._steps += 1
        self._num_tokens += batch.num_tokens
        self._busy_s += batch.device_s
        for answer in batch.answers:
            self._mailbox.send(answer)
        self._mailbox.send(StepReport([], self._stats(batch)))

    def _stats(self, batch: Batch | None = None) -> EngineStats:
        batch = batch or Batch([], 0, 0, 0.0)
        return EngineStats(
            num_waiting=self._queue.num_waiting,
            step_tokens=batch.num_tokens,
            step_sequences=batch.num_texts,
            step_s=batch.device_s,
            cost_s=batch.device_s,
            steps=self._steps,
            prompt_tokens=self._num_tokens,
            queued_tokens=self._queue.num_tokens,
            busy_s=self._busy_s,
        )
