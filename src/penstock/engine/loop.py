"""The engine process's loop: the shell around one or several engines. It reads the mailbox between steps, reads the
clock, waits for the device, and sends what engines have to say.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from penstock.core.clock import Clock
from penstock.core.errors import ModelNotFound
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.encoder import EncoderEngine
from penstock.engine.engine import Engine
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import (
    Abort,
    AdapterAnswer,
    Embed,
    Embedded,
    LoadAdapter,
    Park,
    ParkAnswer,
    RebalanceAnswer,
    RebalanceExperts,
    StepReport,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
    Wake,
)
from penstock.engine.ports import MailboxPort
from penstock.engine.step_log import StepLog

log = logging.getLogger("penstock.engine")

_WAIT_S = 0.002  # for guides or the disk, when there is nothing else to do; then the mail is looked at again
_READ_S = 0.02  # likewise for adapters that are being read, and for blocks that are being written

AnyEngine = Engine | EncoderEngine
Addressed = (
    Submit | Embed | LoadAdapter | UnloadAdapter | Park | Wake | RebalanceExperts
)  # messages that are for one engine


class EngineLoop:
    def __init__(
        self,
        engines: AnyEngine | Mapping[str, AnyEngine],
        mailbox: MailboxPort,
        clock: Clock,
        step_log: StepLog | None = None,
    ) -> None:
        """`engines` by model id; a single one gets all messages. `step_log` is closed with the loop."""
        self._engines = engines if isinstance(engines, Mapping) else {"": engines}
        self._mailbox = mailbox
        self._clock = clock
        self._step_log = step_log

    def run(self) -> None:
        """Serve until a Stop comes, or the server is gone."""
        gc.collect()
        gc.freeze()  # what is loaded by now stays: to look through it again and again takes 100 ms at a time
        try:
            for engine in self._engines.values():
                self._send_outbox(engine)
            while self._read_mail():
                for engine in self._engines.values():
                    if isinstance(engine, Engine):
                        self._advance(engine)
                    if engine.embeddings.has_work:
                        engine.embedded(engine.embeddings.step(self._clock))
                        self._send_outbox(engine)
        except Disconnected:
            log.info("the server is gone; the engine stops")
        finally:
            if self._step_log is not None:
                self._step_log.close()

    # -- mail

    def _read_mail(self) -> bool:
        """Hand messages to their engines; wait for some where no engine has work. False: it is time to stop."""
        engines = self._engines.values()
        for engine in engines:
            # A request that just ended may let others go that waited for their adapter, or was the last before a park;
            # and KV blocks of other engines may have come.
            if engine.lora is not None or engine.wants_park or engine.transfer is not None:
                self._hand(engine, [])
        is_idle = all(engine.is_idle for engine in engines)
        reading = [engine.lora for engine in engines if engine.lora is not None and engine.lora.is_busy]
        writing = [engine for engine in engines if isinstance(engine, Engine) and engine.is_writing]
        messages = self._mailbox.receive(wait=is_idle and not reading and not writing)
        if messages:
            is_alone = len(engines) == 1
            for model, engine in self._engines.items():
                self._hand(engine, messages if is_alone else _for_model(model, messages))
            if not is_alone:
                self._refuse([each for each in messages if _names_model(each) and each.model not in self._engines])
        elif is_idle and reading:
            reading[0].wait(_READ_S)
        elif is_idle and writing:
            writing[0].wait_for_disk(_READ_S, self._clock.now())
        return not any(isinstance(message, Stop) for message in messages)

    def _hand(self, engine: AnyEngine, messages: Sequence[ToEngine]) -> None:
        engine.receive(messages, self._clock.now())
        self._send_outbox(engine)

    def _refuse(self, strays: Sequence[Addressed]) -> None:
        """Answer messages for a model that no engine here serves: nobody else would."""
        for stray in strays:
            told = f"this process has no engine for the model '{stray.model}'"
            log.error("%s: %s", type(stray).__name__, told)
            match stray:
                case Submit(request):
                    event = TokenEvent(request.id, finish=FinishReason.ERROR, error=told)
                    self._mailbox.send(StepReport([event], model=stray.model))
                case Embed(request_id):
                    self._mailbox.send(Embedded(request_id, error=told, model=stray.model))
                case LoadAdapter(digest) | UnloadAdapter(digest):
                    self._mailbox.send(AdapterAnswer(digest, ModelNotFound.code, told, stray.model))
                case Park() | Wake():
                    self._mailbox.send(ParkAnswer(False, code=ModelNotFound.code, message=told, model=stray.model))
                case RebalanceExperts():
                    self._mailbox.send(RebalanceAnswer(code=ModelNotFound.code, message=told, model=stray.model))

    def _send_outbox(self, engine: AnyEngine) -> None:
        for message in engine.outbox:
            self._mailbox.send(message)
        engine.outbox.clear()

    # -- steps

    def _advance(self, engine: Engine) -> None:
        """Launch a step, and read the oldest: first where it must be, else while the new one runs. A pipeline has as
        many launched as it has stages before the first is read."""
        now = self._clock.now()
        if not engine.may_launch:
            self._read(engine)
            is_known = engine.runner.overlaps and not engine.failed_steps
            now = engine.last_commit_s if is_known else self._clock.now()
        is_behind = bool(engine.in_flight)
        is_launched = engine.launch(now)
        if is_behind and (len(engine.in_flight) == engine.max_in_flight or not is_launched):
            self._read(engine)
        elif not engine.in_flight:
            engine.wait(_WAIT_S)
        engine.choose()
        self._send_outbox(engine)

    def _read(self, engine: Engine) -> None:
        plan = engine.in_flight[0].plan
        result = engine.result()
        if result is not None:
            report = engine.commit(result, self._clock.now())
            if self._step_log is not None:
                self._step_log.add(plan, report.step.cost_s)
        self._send_outbox(engine)


def _names_model(message: ToEngine) -> TypeGuard[Addressed]:
    """Whether a message is for one engine. An abort names a request, and only its engine knows it."""
    return not isinstance(message, Abort | Stop)


def _for_model(model: str, messages: Sequence[ToEngine]) -> list[ToEngine]:
    return [each for each in messages if not _names_model(each) or each.model == model]
