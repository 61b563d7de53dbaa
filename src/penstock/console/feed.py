"""The feed of the page, once a second: worked out and encoded once however many look, and kept for who comes later.

It is told of every request once, at its end, and of every choice; that costs an append and a few counts. Rows are made
of them when somebody looks, and no more of them each second than a person could read. It knows neither where the facts
of the moment come from (`Source`) nor how bytes reach a browser (`Viewer`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from penstock import __version__
from penstock.console.history import COLUMNS, Backlog, History
from penstock.console.pipelines import MAX_STEPS, step_rows
from penstock.console.views import DecisionRow, RequestRow, State, decision_row, request_row
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice

PERIOD_S = 1.0
_MAX_REQUESTS, _MAX_TROUBLES, _MAX_DECISIONS = 1000, 200, 500  # kept
_SHOWN_REQUESTS, _SHOWN_DECISIONS = 150, 60  # told to who comes
_NEW_REQUESTS, _NEW_DECISIONS = 40, 15  # told each second; of more, the last

_encode = msgspec.json.Encoder().encode


class Source(Protocol):
    kind: str  # gateway or replica

    def backlogs(self, now_s: float) -> dict[str, Backlog]:
        """Returns the backlogs by model. Called once a second, in the event loop, whether anybody looks or not."""

    def state(self, now_s: float) -> State:
        """All of it, for who looks."""

    def names(self) -> dict[str, str]:
        """Returns the names of replicas by id."""

    def says_output(self, replica_id: str) -> bool:
        """Whether the tokens that it makes are in `Backlog.generated`."""

    def ended(self, facts: RequestFacts) -> None: ...


Viewer = Callable[[bytes], None]


class _Ended(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    facts: RequestFacts


class _Chosen(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    request: EdgeRequest
    choice: Choice


class Feed:
    """Belongs to the event loop. `close` ends the stream of everybody who looks."""

    def __init__(self, source: Source, *, history: History | None = None, period_s: float = PERIOD_S) -> None:
        self._source = source
        self._history = history or History()
        self._period_s = period_s
        self._began_s = time.time()
        self._requests: deque[_Ended] = deque(maxlen=_MAX_REQUESTS)
        self._troubles: deque[_Ended] = deque(maxlen=_MAX_TROUBLES)  # kept longer: they are what people look for
        self._decisions: deque[_Chosen] = deque(maxlen=_MAX_DECISIONS)
        self._new_requests: deque[_Ended] = deque(maxlen=_MAX_REQUESTS)  # since the last tick
        self._new_decisions: deque[_Chosen] = deque(maxlen=_MAX_DECISIONS)
        self._viewers: dict[Viewer, Callable[[], None]] = {}
        self._hello: bytes | None = None  # what who comes now is told first; until the next tick
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    # -- facts

    def ended(self, facts: RequestFacts) -> None:
        kept = facts if len(facts.steps) <= MAX_STEPS else replace(facts, steps=facts.steps[:MAX_STEPS])
        self._new_requests.append(_Ended(time.time(), kept))
        self._history.ended(facts, counts_output=not self._source.says_output(facts.replica))
        self._source.ended(facts)

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        self._new_decisions.append(_Chosen(time.time(), request, choice))

    # -- time

    def start(self) -> None:
        self._tick()

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for end in list(self._viewers.values()):
            end()
        self._viewers.clear()

    def _tick(self) -> None:
        # First: whatever goes wrong in one second is over in it.
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)
        self.tick(time.time())

    def tick(self, now_s: float) -> None:
        rows = self._history.close(now_s, self._source.backlogs(now_s))
        self._hello = None
        requests, decisions = list(self._new_requests), list(self._new_decisions)
        self._new_requests.clear()
        self._new_decisions.clear()
        self._requests.extend(requests)
        self._troubles.extend(one for one in requests if one.facts.ending is not Ending.OK)
        self._decisions.extend(decisions)
        if self._viewers:
            news = {
                "at_s": now_s,
                "state": self._source.state(now_s),
                "rows": rows,
                "requests": self._request_rows(requests[-_NEW_REQUESTS:]),
                "decisions": self._decision_rows(decisions[-_NEW_DECISIONS:]),
            }
            event = _event("tick", news)
            for viewer in list(self._viewers):
                viewer(event)

    # -- who looks

    def watch(self, viewer: Viewer, ended: Callable[[], None]) -> None:
        """It is told how all was at the last tick, and the news from then on."""
        viewer(self.hello())
        if self._is_closed:
            ended()
        else:
            self._viewers[viewer] = ended

    def leave(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def hello(self) -> bytes:
        if self._hello is None:
            shown = {id(one): one for one in (*self._troubles, *list(self._requests)[-_SHOWN_REQUESTS:])}
            requests = sorted(shown.values(), key=lambda one: one.at_s)
            everything = {
                "kind": self._source.kind,
                "version": __version__,
                "began_s": self._began_s,
                "at_s": time.time(),
                "columns": COLUMNS,
                "times": list(self._history.times),
                "series": self._history.columns(),
                "state": self._source.state(time.time()),
                "requests": self._request_rows(requests),
                "decisions": self._decision_rows(list(self._decisions)[-_SHOWN_DECISIONS:]),
            }
            self._hello = _event("hello", everything)
        return self._hello

    def request(self, request_id: str) -> dict[str, object] | None:
        """One request that is over, with the choices that were made for it."""
        found = [one for one in (*self._troubles, *self._requests, *self._new_requests) if one.facts.id == request_id]
        if not found:
            return None
        chosen = [one for one in (*self._decisions, *self._new_decisions) if one.request.id == request_id]
        return {
            "request": self._request_rows(found[-1:])[0],
            "decisions": self._decision_rows(chosen),
            "steps": step_rows(found[-1].facts.steps),
        }

    def _request_rows(self, ended: list[_Ended]) -> list[RequestRow]:
        names = self._source.names()
        return [request_row(one.at_s, one.facts, names.get(one.facts.replica, one.facts.replica)) for one in ended]

    def _decision_rows(self, chosen: list[_Chosen]) -> list[DecisionRow]:
        names = self._source.names()
        return [decision_row(one.at_s, one.request, one.choice, names) for one in chosen]


def _event(kind: str, document: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(document))
