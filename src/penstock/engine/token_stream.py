"""A reader's hold on its requests in the engine. It is ownership: closing it, for whatever reason, ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from penstock.core.errors import EngineFailed, PenstockError, UnsupportedParameter
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.accounts import Meter


class TokenStream:
    """The news of a group of requests, in order. Use it as a context manager: leaving it aborts what still runs."""

    def __init__(self, abort: Callable[[str], None], request_ids: list[str]) -> None:
        self._abort = abort
        self._request_ids = request_ids
        self._events: list[TokenEvent] = []
        self._error: PenstockError | None = None
        self._news = asyncio.Event()
        self.meter = Meter()  # of what they cost

    def push(self, event: TokenEvent) -> None:
        if self._error is None:
            self._events.append(event)
            self._news.set()

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self._news.set()

    async def next(self) -> list[TokenEvent]:
        """All the news since the last call; waits if there is none. A slow reader gets more at a time, and what came
        before an error before the error."""
        await self._news.wait()
        events, self._events = self._events, []
        for number, event in enumerate(events):
            if event.finish is FinishReason.ERROR:
                is_requests = event.error_code == UnsupportedParameter.code
                kind = UnsupportedParameter if is_requests else EngineFailed
                self._error = kind(event.error or "the engine failed while running this request")
                del events[number:]
                break
        if self._error is None:
            self._news.clear()
        elif not events:
            raise self._error
        return events

    def close(self) -> None:
        """The work of one reader is over: whatever still runs for it ends."""
        for request_id in self._request_ids:
            self._abort(request_id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
