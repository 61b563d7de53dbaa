"""The server's side of embeddings: who waits for which answer of the engine's. Belongs to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.core.errors import EngineFailed, PenstockError
from penstock.engine.messages import Abort, Embed, Embedded


class EmbeddingCalls:
    def __init__(self, send: Callable[[Embed | Abort], None], check_ready: Callable[[], None]) -> None:
        self._send = send
        self._check_ready = check_ready
        self._waiting: dict[str, asyncio.Future[Embedded]] = {}
        self.num_texts = 0  # that the engine has

    async def __call__(self, message: Embed) -> Embedded:
        """The answer, whole. A caller that stops waiting for it ends the work."""
        self._check_ready()
        waiting = self._waiting[message.request_id] = asyncio.get_running_loop().create_future()
        self.num_texts += len(message.texts)
        self._send(message)
        try:
            answer: Embedded = await waiting
        except asyncio.CancelledError:
            self._send(Abort(message.request_id))
            raise
        finally:
            self.num_texts -= len(message.texts)
            del self._waiting[message.request_id]
        if answer.error is not None:
            raise EngineFailed(answer.error)
        return answer

    def take(self, answer: Embedded) -> None:
        waiting = self._waiting.get(answer.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: PenstockError) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
