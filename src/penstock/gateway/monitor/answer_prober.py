"""Asks every replica what is known, for as long as the gateway runs, and tells the watch what it said.

Liveness is for `health.probe`; this is about answers that come, and are wrong. The question goes to each replica as a
client's would, past the queue and the books; a server that wants a key is paid by the token and is not asked, and one
that gives no log-probabilities cannot be compared.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from msgspec import Struct

from penstock.core.replica import ReplicaState
from penstock.gateway.proxy.direct_request import ask
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.http import clock as clocks
from penstock.http.clock import TimerClock
from penstock.observe.background import outliving
from penstock.observe.redaction import redact
from penstock.watch.answers import KnownAnswers, Said, SaidToken
from penstock.watch.settings import ProbeSettings
from penstock.watch.watch import Watch

_QUESTION = "Count from one to twenty in words, separated by commas."
_USABLE = (ReplicaState.READY, ReplicaState.DEGRADED)
_BUSY = (429, 503, 529)  # or draining
_PATH = b"/v1/chat/completions"
_TOP = 5


class ProbeView(Struct, frozen=True, kw_only=True):
    model: str
    adapter: str
    replica: str
    state: str
    drift: float | None
    reason: str
    asked_at: float | None
    asked: int
    failed: int
    wrong: int


class _Likely(Struct):
    token: str
    logprob: float


class _Scored(_Likely):
    top_logprobs: list[_Likely] = []


class _Scores(Struct):
    content: list[_Scored] | None = None


class _Choice(Struct):
    logprobs: _Scores | None = None


class _Completion(Struct):
    choices: list[_Choice]


_completions = msgspec.json.Decoder(_Completion)


class AnswerProber(Subscriber):
    def __init__(self, watch: Watch, settings: ProbeSettings, clock: TimerClock) -> None:
        self._watch = watch
        self._settings = settings
        self._replicas: dict[str, list[Replica]] = {}
        self._able: set[str] = set()  # they have given log-probabilities
        self._mute: set[str] = set()  # they cannot
        self._clock = clock

    def replica_added(self, replica: Replica) -> None:
        if not replica.has_key:
            self._replicas.setdefault(replica.model, []).append(replica)

    def replica_removed(self, replica: Replica) -> None:
        if not replica.has_key:
            self._replicas[replica.model].remove(replica)
            if not self._replicas[replica.model]:
                del self._replicas[replica.model]
        self._able.discard(replica.id)
        self._mute.discard(replica.id)

    async def run(self) -> None:
        """For ever."""
        while True:
            await clocks.sleep(self._clock, self._settings.every_s)
            with outliving("known questions"):
                await self.round()

    async def round(self) -> None:
        """Everybody, once: the replicas of a model at the same time, the models one after another."""
        for model in list(self._replicas):
            for adapter in ("", *self._settings.adapters.get(model, ())):
                await self._ask_all(model, adapter)

    def views(self) -> list[ProbeView]:
        return [
            ProbeView(
                model=model,
                adapter=adapter,
                replica=replica,
                state=one.state,
                drift=one.drift,
                reason=one.reason,
                asked_at=one.asked_at,
                asked=one.asked,
                failed=one.failed,
                wrong=one.wrong,
            )
            for (model, adapter), answers in self._watch.answers.items()
            for replica, one in answers.statuses.items()
        ]

    async def _ask_all(self, model: str, adapter: str) -> None:
        asked = [one for one in self._replicas.get(model, ()) if one.id not in self._mute and self._is_usable(one)]
        found = await asyncio.gather(*(self._ask(replica, adapter) for replica in asked))
        said = {
            redact(replica.id): one for replica, one in zip(asked, found, strict=True) if not isinstance(one, _NotAsked)
        }
        answers = self._watch.answers.get((model, adapter))
        if answers is None:
            if not said:
                return
            answers = self._watch.answers[model, adapter] = KnownAnswers(tolerance=self._settings.tolerance)
        answers.said([redact(one.id) for one in asked], said, time.time())  # who is out is nobody's answer

    def _is_usable(self, replica: Replica) -> bool:
        snapshot = replica.snapshot
        is_able = not (snapshot.is_tripped or snapshot.needs_peer)
        return is_able and snapshot.state_at(self._clock.now()) in _USABLE

    async def _ask(self, replica: Replica, adapter: str) -> Said | _NotAsked | None:
        body = msgspec.json.encode(
            {
                "model": adapter or replica.served_as,
                "messages": [{"role": "user", "content": _QUESTION}],
                "max_tokens": self._settings.tokens,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": _TOP,
            }
        )
        answer = await ask(replica, _PATH, body, timeout_s=self._settings.timeout_s)
        if answer is None:
            return None
        status, text = answer
        if not status or status in _BUSY:
            return _NotAsked()
        said = _read(text) if status == 200 else None
        if said is not None:
            self._able.add(replica.id)
        elif status < 500 and not adapter and replica.id not in self._able:
            self._mute.add(replica.id)
            return _NotAsked()
        return said


class _NotAsked:
    """Nothing can be told from this."""


def _read(body: bytes) -> Said | None:
    """None: there are no log-probabilities in it."""
    try:
        scores = _completions.decode(body).choices[0].logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return None
    if scores is None or scores.content is None:
        return None
    return tuple(
        SaidToken(one.token, one.logprob, {other.token: other.logprob for other in one.top_logprobs})
        for one in scores.content
    )
