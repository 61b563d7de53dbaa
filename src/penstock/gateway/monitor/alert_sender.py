"""Messages about alerts on their way: each goes to every address, is tried again for a while, and never waited for.

An address that does not answer keeps its own queue, which is bounded: beyond it the oldest are lost, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from msgspec import Struct

from penstock.gateway.replicas.fetch import fetch
from penstock.http import clock as clocks
from penstock.http.call import Failure
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.message import JSON
from penstock.http.upstream import Upstream
from penstock.observe.background import Worker, outliving
from penstock.watch.notices import Notice

log = logging.getLogger("penstock.alerts")

_NAME = "alert courier"
_MAX_WAITING = 100
_MAX_TRIES = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_TIMEOUT_S = 10.0
_BUSY = 429


class CourierView(Struct, frozen=True):
    to: str
    sent: int
    failed: int
    waiting: int
    lost: int


class AlertSender:
    def __init__(self, to: str, url: str, payload: Callable[[Notice], bytes], clock: TimerClock = LOOP_CLOCK) -> None:
        self._to = to
        self._upstream = Upstream.from_url(url, clock=clock)
        parts = urlsplit(url)
        self._target = ((parts.path or "/") + (f"?{parts.query}" if parts.query else "")).encode()
        self._payload = payload
        self._clock = clock
        self._waiting: deque[Notice] = deque()
        self._news = asyncio.Event()
        self._sent = self._failed = self._lost = 0
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._worker = Worker.of_task(_NAME, self._task)

    @property
    def view(self) -> CourierView:
        return CourierView(self._to, self._sent, self._failed, len(self._waiting), self._lost)

    def take(self, notice: Notice) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(notice)
        self._news.set()

    def close(self) -> None:
        self._worker.stop()
        self._task.cancel()
        self._upstream.close()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                notice, is_sent = self._waiting.popleft(), False
                with outliving(_NAME):
                    is_sent = await self._deliver(self._payload(notice))
                if is_sent:
                    self._sent += 1
                else:
                    self._failed += 1

    async def _deliver(self, body: bytes) -> bool:
        pause_s, what = _FIRST_PAUSE_S, ""
        for attempt in range(_MAX_TRIES):
            if attempt:
                await clocks.sleep(self._clock, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            answer = await fetch(self._upstream, self._target, JSON, timeout_s=_TIMEOUT_S, body=body)
            if isinstance(answer, Failure):
                what = answer.message
            elif answer.status < 300:
                return True
            else:
                what = f"status {answer.status}"
                if answer.status < 500 and answer.status != _BUSY:
                    break  # it will not like it better later
        log.warning("a message about an alert could not be delivered by %s: %s", self._to, what)
        return False
