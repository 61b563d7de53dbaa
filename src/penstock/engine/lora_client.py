"""The server's side of the engine's adapters: ask for them, hear what came of it, ask again after a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.core.errors import EngineUnavailable, PenstockError
from penstock.engine.messages import AdapterAnswer, AdapterState, LoadAdapter, ToEngine, UnloadAdapter

log = logging.getLogger("penstock.engine")


class LoraClient:
    """Adapters are known by the digest of their content; what clients call them is the server's affair."""

    def __init__(self, send: Callable[[ToEngine], None], as_error: Callable[[str, str], PenstockError]) -> None:
        self._send = send
        self._as_error = as_error
        self._loaded: dict[str, LoadAdapter] = {}
        self._turns: dict[str, asyncio.Lock] = {}  # one question about an adapter at a time
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._is_ready = False
        self._state = AdapterState()
        self._before = AdapterState()  # the sums of processes that are gone

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    @property
    def device(self) -> list[str]:
        """Digests of those on the device."""
        return self._state.device

    @property
    def host(self) -> list[str]:
        return self._state.host

    @property
    def swaps(self) -> int:
        return self._before.swaps + self._state.swaps

    @property
    def reads(self) -> int:
        return self._before.reads + self._state.reads

    async def load(self, digest: str, path: str, *, pinned: bool = False) -> None:
        """Waits until the engine has it; from then on all its processes will. Raises if it cannot have it."""
        await self._ask(LoadAdapter(digest, path, pinned))

    async def unload(self, digest: str) -> None:
        """Waits until nobody runs with it any more."""
        await self._ask(UnloadAdapter(digest))

    async def _ask(self, message: LoadAdapter | UnloadAdapter) -> None:
        """The caller may go away; the answer is waited for all the same, or it would be taken for another's."""
        asking = asyncio.ensure_future(self._exchange(message))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to be told
        await asyncio.shield(asking)

    async def _exchange(self, message: LoadAdapter | UnloadAdapter) -> None:
        digest = message.digest
        async with self._turns.setdefault(digest, asyncio.Lock()):
            if not self._is_ready:
                raise EngineUnavailable("the engine is not ready", retry_after_s=5.0)
            if isinstance(message, UnloadAdapter):
                self._loaded.pop(digest, None)
            answer = self._waiting[digest] = asyncio.get_running_loop().create_future()
            self._send(message)
            await answer
            if isinstance(message, LoadAdapter):
                self._loaded[digest] = message

    # -- told by the client --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A process is ready: give it what the one before had."""
        self._is_ready = True
        for message in self._loaded.values():
            self._send(message)

    def end(self) -> None:
        """The process is gone."""
        self._is_ready = False
        self._before = AdapterState(swaps=self.swaps, reads=self.reads)
        self._state = AdapterState()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(EngineUnavailable("the engine process died", retry_after_s=5.0))

    def take(self, message: AdapterAnswer | AdapterState) -> None:
        if isinstance(message, AdapterState):
            self._state = message
            return
        answer = self._waiting.pop(message.digest, None)
        if answer is None:  # it was asked for again after a restart, or its directory was gone when it was needed
            if message.code:
                log.error("an adapter cannot be used: %s", message.message)
        elif message.code:
            answer.set_exception(self._as_error(message.code, message.message))
        else:
            answer.set_result(None)
