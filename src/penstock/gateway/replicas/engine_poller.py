"""Follows a replica that is not penstock's: finds out what it is, asks how busy it is, and whether it is there.

What it says is read by its dialect's tables. A reading that does not come, or does not say how busy the server is, is
none: the last one grows old, and old is degraded, never idle. A server that cannot say it at all is counted by what
this gateway sent it. One whose steps stand still while it has work hangs, whatever its health path answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from penstock.core.measurements import EngineMeasurements, EngineSpeeds
from penstock.core.replica import GONE_AFTER_S, STALE_AFTER_S, ReplicaSnapshot, ReplicaState
from penstock.dialects import detect, reading
from penstock.dialects.dialect import Dialect, Document, Signal
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.liveness import Answer, Liveness, liveness
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.fetch import fetch
from penstock.health.replica_health import ReplicaHealth
from penstock.http import clock as clocks
from penstock.http.call import Failure, FailureKind
from penstock.http.upstream import Upstream
from penstock.observe.background import outliving

_NAME = "replica follower"
MIN_POLL_S = 0.25
_FACTS_EVERY_S = 30.0
_MODELS = b"/v1/models"
_SOON_S = 1.0  # a server that is not ready is looked at so often
_UNKNOWN = (404, 405, 501)
_REFUSED = (FailureKind.REFUSED, FailureKind.CONNECT_TIMEOUT)

_log = logging.getLogger(__name__)


class Followed(Protocol):
    """Part of a `gateway.replicas.Replica` that the poller needs."""

    id: str
    model: str
    served_as: str
    upstream: Upstream
    headers: bytes
    health: ReplicaHealth
    probe_every_s: float | None
    deep_probe_every_s: float | None
    prefill_speed: float | None
    is_asleep: bool

    @property
    def url(self) -> str: ...
    def heard(self, said: ReplicaSnapshot) -> None: ...
    def lost(self) -> None: ...
    def lists(self, adapters: frozenset[str]) -> None: ...
    def send_away(self) -> None: ...


class EnginePoller:
    """Begins at once and ends with `close`. `dialect` is None until it is known, unless it was given."""

    def __init__(
        self,
        replica: Followed,
        changed: Callable[[], None],
        *,
        dialect: Dialect | None = None,
        poll_every_s: float = MIN_POLL_S,
        metrics: Upstream | None = None,
        is_plain: Callable[[], None] | None = None,
    ) -> None:
        """`metrics`: where its numbers are, if neither where requests go nor at the usual port. `is_plain` is called
        when it turns out to be a server of which nothing but OpenAI's paths is known; there is nothing to follow then.
        """
        self.dialect: Dialect | None = None
        self.liveness: Liveness | None = None  # None: nobody has asked yet
        self._replica = replica
        self._changed = changed
        self._poll_every_s = min(max(poll_every_s, MIN_POLL_S), STALE_AFTER_S / 2)
        self._stale_after_s = replica.health.settings.stale_after_s
        self._metrics = metrics
        self._is_plain = is_plain
        self._others: dict[int, Upstream] = {}  # by port
        self._document: Document | None = None  # where it says how busy it is
        self._facts: dict[Signal, float] = {}
        self._facts_at = 0.0  # when they are asked for again
        self._progress = reading.Progress()
        self._lately = reading.Lately()
        self._said = ReplicaSnapshot(id=replica.id, url=replica.url, models=(replica.model,))
        self._complaint = ""
        self._is_ready = asyncio.Event()
        self._is_doubted = asyncio.Event()  # it refuses connections: whether it is there is asked at once
        if dialect is not None:
            self._speak(dialect)
        self._clock = replica.upstream.clock
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch()), loop.create_task(self._listen())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for upstream in self._others.values():
            upstream.close()

    # -- whether it is there

    async def _watch(self) -> None:
        replica = self._replica
        every_s = replica.probe_every_s or replica.health.settings.probe_every_s
        deep_every_s = replica.deep_probe_every_s or float("inf")
        deep_at = self._clock.now() + deep_every_s
        replica.health.await_probe()
        while True:
            hung = self.liveness is Liveness.READY and not replica.health.is_in
            is_deep = hung or self._clock.now() >= deep_at  # until one passes: a shallow one would hide what it found
            is_well = False
            with outliving(_NAME):
                await self._probe(is_deep)
                is_well = self.liveness is Liveness.READY
                if is_deep and is_well:
                    deep_at = self._clock.now() + deep_every_s
                self._changed()
            wait_s = every_s if is_well and replica.health.is_in else min(_SOON_S, every_s)
            with contextlib.suppress(TimeoutError):
                async with clocks.timeout(self._clock, wait_s):
                    await self._is_doubted.wait()
            self._is_doubted.clear()

    async def _probe(self, is_deep: bool) -> None:
        if self.dialect is None:
            await self._detect()
            is_unwatched = self._replica.probe_every_s == 0  # only what it is must be known, for what it is sent
            if self._is_plain is not None and (self.dialect is OPENAI or (is_unwatched and self.dialect is not None)):
                self._is_plain()
                await asyncio.sleep(0)  # which ends this task
            if is_unwatched:
                return
        dialect, replica = self.dialect or OPENAI, self._replica
        answer = await (self._ask_deep(dialect) if is_deep else self._ask(dialect.health.path))
        is_refused = isinstance(answer, Failure) and answer.kind in _REFUSED
        was_ready = self.liveness in (Liveness.READY, Liveness.FAILING)
        found = liveness(
            dialect, None if isinstance(answer, Failure) else answer, is_refused=is_refused, was_ready=was_ready
        )
        if was_ready and found in (Liveness.GONE, Liveness.STARTING):
            replica.lost()
            replica.send_away()
            replica.lists(frozenset())
            self._facts_at = 0.0  # it may be another when it comes back
            self._document = None
        self.liveness = found
        is_ready = found is Liveness.READY and self.dialect is not None
        self._is_ready.set() if is_ready else self._is_ready.clear()
        if found is not Liveness.STARTING:  # to start is no failure, and no success
            replica.health.probed(found is Liveness.READY)

    async def _detect(self) -> None:
        replica = self._replica
        answers: dict[str, Answer] = {}
        for path in detect.paths(replica.served_as):
            answer = await self._ask(path.encode())
            if isinstance(answer, Failure):
                if answer.kind in _REFUSED:
                    return
            elif answer.status == 503:
                return  # it starts: what it is, it will say
            else:
                answers[path] = answer
        if answers:
            self._speak(detect.detect(answers, replica.served_as))

    def _speak(self, dialect: Dialect) -> None:
        _log.info("%s speaks %s", self._replica.id, dialect.name)
        self.dialect = dialect
        if isinstance(self._replica.upstream, DialectUpstream):
            self._replica.upstream.dialect = dialect

    async def _ask_deep(self, dialect: Dialect) -> Answer | Failure:
        timeout_s = self._replica.health.settings.deep_probe_timeout_s
        if dialect.health.deep is not None:
            return await self._ask(dialect.health.deep, timeout_s=timeout_s)
        wanted = {"model": self._replica.served_as, "prompt": "1", "max_tokens": 1}
        return await self._ask(b"/v1/completions", timeout_s=timeout_s, body=msgspec.json.encode(wanted))

    # -- what it says

    async def _listen(self) -> None:
        while True:
            await self._is_ready.wait()
            began = self._clock.now()
            with outliving(_NAME):  # whatever it says: what it said last grows old
                await self._hear_from_it(began)
            await clocks.sleep(self._clock, max(0.0, began + self._poll_every_s - self._clock.now()))

    async def _hear_from_it(self, now: float) -> None:
        dialect = self.dialect
        assert dialect is not None
        if now >= self._facts_at:
            is_new, self._facts_at = self._facts_at == 0.0, now + _FACTS_EVERY_S
            await self._learn(dialect, is_new)
        if self._document is not None:
            await self._poll(dialect, self._document)
        self._changed()

    async def _learn(self, dialect: Dialect, is_new: bool) -> None:
        """Reads what hardly changes, and of a new replica, which document says how busy it is."""
        for document in dialect.facts:
            answer = await self._ask(document.path, self._upstream(document))
            if isinstance(answer, Answer) and answer.status == 200:
                self._facts |= reading.read(document, answer.body)
                if document.path == _MODELS and dialect.lora is not None and dialect.lora.select is not None:
                    self._replica.lists(reading.adapters(answer.body))
        if is_new:
            self._document = await self._load_document(dialect)
        if self._document is None:
            self._replica.heard(self._snapshot(dialect, self._facts, None))

    async def _load_document(self, dialect: Dialect) -> Document | None:
        """The first that it knows; None: it says nothing of the kind."""
        for document in dialect.loads if dialect.has_load else ():
            answer = await self._ask(document.path, self._upstream(document))
            if isinstance(answer, Answer) and answer.status in _UNKNOWN:
                continue
            return document
        return None

    async def _poll(self, dialect: Dialect, document: Document) -> None:
        """A reading counts from when it was asked for: what was sent since then cannot be in it."""
        sent_at = self._clock.now()
        said = await self._read(document)
        if said is not None:
            self._hear(dialect, self._facts | said, sent_at)
        elif sent_at - self._said.taken_at > self._stale_after_s:
            # It answers its health path, so it is of use: the last of all, and as busy as it last was.
            self._replica.heard(replace(self._said, state=ReplicaState.DEGRADED, taken_at=sent_at - GONE_AFTER_S / 2))

    async def _read(self, document: Document) -> dict[Signal, float] | None:
        answer = await self._ask(document.path, self._upstream(document), timeout_s=self._stale_after_s)
        if isinstance(answer, Failure) or answer.status != 200:
            if isinstance(answer, Failure) and answer.kind in _REFUSED:
                self._is_doubted.set()
            self._complain(f"{document.path.decode()}: {answer[1] if isinstance(answer, Failure) else answer.status}")
            return None
        values = reading.read(document, answer.body)
        if missing := reading.missing(document, values):
            self._complain(f"{document.path.decode()} does not say {' and '.join(missing)}")
            return None
        self._complain("")
        return values

    def _hear(self, dialect: Dialect, values: reading.Values, sent_at: float) -> None:
        replica, snapshot = self._replica, self._snapshot(dialect, values, sent_at)
        measured = self._measured(values, snapshot)
        replica.is_asleep = values.get(Signal.IS_AWAKE) == 0
        is_lost = replica.health.hangs(measured, self._clock.now())
        self._said = replace(snapshot, load=measured.load)
        replica.heard(self._said)
        if is_lost:
            _log.warning("%s has work and makes no step", replica.id)
            replica.send_away()

    def _snapshot(self, dialect: Dialect, values: reading.Values, sent_at: float | None) -> ReplicaSnapshot:
        replica, before = self._replica, self._lately.before(values, self._clock.now())
        replica.prefill_speed = reading.prefill_rate(values, before)
        said = reading.snapshot(
            dialect, values, before, id=replica.id, url=replica.url, model=replica.model, taken_at=sent_at
        )
        return replace(said, stale_after_s=self._stale_after_s)

    def _measured(self, values: reading.Values, snapshot: ReplicaSnapshot) -> EngineMeasurements:
        """For the watchdog, which is more patient with one that has computed nothing yet."""
        speed = reading.prefill_rate(values, {}) or (2000.0 if self._has_worked(values) else None)
        return EngineMeasurements(
            replace(snapshot.load, steps=self._progress.steps(values)),
            limits=snapshot.limits,
            speeds=EngineSpeeds(speed),
        )

    @staticmethod
    def _has_worked(values: reading.Values) -> bool:
        return any(values.get(signal) for signal in (Signal.STEPS, Signal.DECODE_TOKENS, Signal.DECODE_RATE))

    # -- asking

    async def _ask(
        self,
        path: bytes,
        upstream: Upstream | None = None,
        *,
        timeout_s: float | None = None,
        body: bytes | None = None,
    ) -> Answer | Failure:
        replica = self._replica
        timeout_s = timeout_s or replica.health.settings.probe_timeout_s
        return await fetch(upstream or replica.upstream, path, replica.headers, timeout_s=timeout_s, body=body)

    def _upstream(self, document: Document) -> Upstream:
        if document.port is None:
            return self._replica.upstream
        if self._metrics is not None:
            return self._metrics
        if document.port not in self._others:
            self._others[document.port] = Upstream(self._replica.upstream.host, document.port, clock=self._clock)
        return self._others[document.port]

    def _complain(self, what: str) -> None:
        """Once for each new reason."""
        if what and what != self._complaint:
            _log.warning("%s does not say how busy it is: %s", self._replica.id, what)
        self._complaint = what
