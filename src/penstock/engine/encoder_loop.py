"""The loop of an engine whose model makes vectors and nothing else: read the mail, compute a batch, answer."""

from __future__ import annotations

import gc
import logging

from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineTotals, PrefixCacheUse
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.embedding import EmbedQueue
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import Abort, Embed, StepFigures, StepReport, Stop, Submit
from penstock.engine.ports import MailboxPort

log = logging.getLogger("penstock.engine")


class EncoderLoop:
    def __init__(self, queue: EmbedQueue, mailbox: MailboxPort) -> None:
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
                    self._mailbox.send(StepReport([event], self._measured()))
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
        step = StepFigures(batch.num_tokens, batch.num_texts, cost_s=batch.device_s)
        self._mailbox.send(StepReport([], self._measured(), step))

    def _measured(self) -> EngineMeasurements:
        queue = self._queue
        return EngineMeasurements(
            EngineLoad(num_waiting=queue.num_waiting, queued_tokens=queue.num_tokens, steps=self._steps),
            EngineTotals(busy_s=self._busy_s),
            PrefixCacheUse(prompt_tokens=self._num_tokens),
        )
