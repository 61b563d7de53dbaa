"""Adapters of one engine: they are loaded, kept and dropped, and requests are held back until theirs is in host memory.
The manager knows digests, paths and counts; the weights are the runner's, the slots on the device the scheduler's.

An adapter is read from disk by a thread, so no step waits for it. Host memory holds the most recently used ones; those
that a sequence here needs stay in any case, and what finds no room because of them waits until there is some.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from penstock.core.errors import Conflict, PenstockError
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterState,
    LoadAdapter,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from penstock.sched.lora import AdapterSlots

log = logging.getLogger("penstock.engine")


class AdapterWeights(Protocol):
    """The runner's adapters: see `runner.adapters`."""

    def read(self, path: str, digest: str) -> Any:
        """Blocks; called by a thread."""

    def keep(self, adapter: Any) -> None: ...

    def forget(self, digest: str) -> None:
        """Drops it from host memory."""

    def clear(self, slot: int) -> None:
        """Off the device."""


class LoraManager:
    def __init__(self, weights: AdapterWeights, slots: AdapterSlots, *, max_host: int, model: str = "") -> None:
        """`model` is what messages are marked with, where several engines share a process."""
        self._weights = weights
        self._slots = slots
        self._max_host = max_host
        self._model = model
        self._known: dict[str, LoadAdapter] = {}  # by digest
        self._host: dict[str, None] = {}  # in host memory; who was used longest ago comes first
        self._wanted: dict[str, None] = {}  # to be read, in this order, once there is room
        self._reading: dict[str, Future[Any]] = {}
        self._held: dict[str, list[Request]] = {}  # requests that came before their adapter
        self._leaving: set[str] = set()
        self._unanswered: set[str] = set()  # loads that somebody waits for
        self._reads = 0
        self._told = AdapterState(model=model)
        self._answers: list[AdapterAnswer | AdapterState] = []
        self._failures: list[TokenEvent] = []
        self._threads = ThreadPoolExecutor(1, "adapters")
        self._wake = threading.Event()
        self.is_parked = False  # the device's memory is away: slots stay as they are

    def receive(self, messages: Sequence[ToEngine]) -> list[ToEngine]:
        """Messages that are left for the engine, and before them requests whose adapter has come meanwhile."""
        return [*self._settle(), *self._pass(messages), *self._settle()]

    @property
    def is_busy(self) -> bool:
        """Whether an adapter is being read, or is to be."""
        return bool(self._reading or self._wanted)

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter may have been read."""
        self._wake.wait(timeout_s)
        self._wake.clear()

    def take_answers(self) -> list[AdapterAnswer | AdapterState]:
        answers, self._answers = self._answers, []
        return answers

    def take_failures(self) -> list[TokenEvent]:
        """Ends of requests that cannot have their adapter."""
        failures, self._failures = self._failures, []
        return failures

    def _pass(self, messages: Sequence[ToEngine]) -> Iterator[ToEngine]:
        for message in messages:
            match message:
                case LoadAdapter():
                    self._load(message)
                case UnloadAdapter(digest):
                    self._known.pop(digest, None)
                    self._slots.unpin(digest)
                    self._leaving.add(digest)
                case Submit(request) if request.adapter is not None:
                    yield from self._submit(request, request.adapter.digest)
                case Abort(request_id) if self._take_held(request_id):
                    pass
                case _:
                    yield message

    # -- what is asked for ---------------------------------------------------------------------------------------------

    def _load(self, message: LoadAdapter) -> None:
        digest = message.digest
        self._known[digest] = message
        self._leaving.discard(digest)
        if digest in self._host:
            self._answer_load(digest)
        else:
            self._unanswered.add(digest)
            self._want(digest)

    def _submit(self, request: Request, digest: str) -> Iterator[ToEngine]:
        if digest not in self._known:
            self._fail([request], "its adapter is not loaded")
        elif digest in self._host:
            self._host[digest] = self._host.pop(digest)
            yield Submit(request)
        else:
            self._held.setdefault(digest, []).append(request)
            self._want(digest)

    def _want(self, digest: str) -> None:
        if digest not in self._reading:
            self._wanted.setdefault(digest)

    def _take_held(self, request_id: str) -> bool:
        for digest, requests in self._held.items():
            for request in requests:
                if request.id == request_id:
                    requests.remove(request)
                    if not requests:
                        del self._held[digest]
                    return True
        return False

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def _settle(self) -> list[ToEngine]:
        if not (self._known or self._leaving or self._reading):  # nobody uses adapters
            return []
        before = len(self._answers)
        messages = list(self._advance())
        self._tell(before)
        return messages

    def _advance(self) -> Iterator[ToEngine]:
        """Finish what was read, begin what can be; the requests that waited for it."""
        for digest in [digest for digest, future in self._reading.items() if future.done()]:
            yield from self._finish(digest, self._reading.pop(digest))
        for digest in list(self._wanted):
            if not self._make_room():
                break
            del self._wanted[digest]
            if digest in self._known:
                self._begin(self._known[digest])
        if not self.is_parked:
            for digest in [digest for digest in self._leaving if not self._is_needed(digest)]:
                self._drop(digest)

    def _begin(self, adapter: LoadAdapter) -> None:
        future = self._threads.submit(self._weights.read, adapter.path, adapter.digest)
        self._reading[adapter.digest] = future
        future.add_done_callback(lambda _: self._wake.set())

    def _finish(self, digest: str, read: Future[Any]) -> Iterator[ToEngine]:
        held = self._held.pop(digest, [])
        if digest not in self._known:  # it was unloaded meanwhile
            self._weights.forget(digest)
            self._fail(held, "its adapter was unloaded")
            return
        try:
            self._weights.keep(read.result())
        except Exception as error:
            known = isinstance(error, PenstockError)
            message = error.message if isinstance(error, PenstockError) else f"the adapter could not be read: {error}"
            log.log(logging.WARNING if known else logging.ERROR, "%s", message, exc_info=not known)
            del self._known[digest]
            self._slots.unpin(digest)
            self._fail(held, message)
            self._unanswered.discard(digest)
            self._answer(digest, getattr(error, "code", PenstockError.code), message)
            return
        self._reads += 1
        self._host[digest] = None
        if digest in self._unanswered:
            self._unanswered.discard(digest)
            self._answer_load(digest)
        yield from map(Submit, held)

    def _answer_load(self, digest: str) -> None:
        code, message = "", ""
        if not self._known[digest].pinned:
            self._slots.unpin(digest)
        elif not self._slots.pin(digest):
            code = Conflict.code
            message = f"{self._slots.num_slots} adapters have room on the device, and one place must not be pinned"
        self._answer(digest, code, message)

    def _make_room(self) -> bool:
        if len(self._host) + len(self._reading) < self._max_host:
            return True
        idle = next((digest for digest in self._host if not self._is_needed(digest)), None)
        if idle is None:
            return False
        del self._host[idle]
        self._weights.forget(idle)
        return True

    def _is_needed(self, digest: str) -> bool:
        return digest in self._held or self._slots.is_needed(digest)

    def _drop(self, digest: str) -> None:
        self._leaving.discard(digest)
        self._wanted.pop(digest, None)
        self._host.pop(digest, None)
        slot = self._slots.drop(digest)
        if slot is not None:
            self._weights.clear(slot)
        self._weights.forget(digest)
        self._answer(digest)

    def _answer(self, digest: str, code: str = "", message: str = "") -> None:
        self._answers.append(AdapterAnswer(digest, code, message, self._model))

    def _fail(self, requests: list[Request], message: str) -> None:
        self._failures += [TokenEvent(each.id, finish=FinishReason.ERROR, error=message) for each in requests]

    def _tell(self, place: int) -> None:
        """Say where the adapters are, if that has changed, before the answers that changed it."""
        state = AdapterState(self._slots.resident, list(self._host), self._slots.swaps, self._reads, self._model)
        if state != self._told:
            self._told = state
            self._answers.insert(place, state)
