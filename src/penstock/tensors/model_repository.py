"""The models of one server, by name: loaded, loaded anew and unloaded while it serves.

A model that is loaded anew answers from its old versions until the new ones are warm; those end what they have begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from penstock.core.config import shown
from penstock.core.errors import EngineUnavailable, ModelNotFound, PenstockError
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.tensors import loading
from penstock.tensors.model_settings import ModelSettings
from penstock.tensors.onnx_model import Place
from penstock.tensors.repository import open_directory
from penstock.tensors.served_model import Observer, ServedModel

State = Literal["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]  # Triton's words


class _Entry:
    def __init__(self) -> None:
        self.model: ServedModel | None = None
        self.state: State = "UNAVAILABLE"
        self.reason = "not loaded"
        self.lock = asyncio.Lock()


class ModelRepository:
    def __init__(
        self,
        paths: Callable[[], Mapping[str, Path]],
        place: Place = Place(),  # noqa: B008 (a tuple)
        *,
        clock: TimerClock = LOOP_CLOCK,
        observer: Observer | None = None,
    ) -> None:
        """`paths`: of the models that there are, by name; asked again for each call."""
        self._place = place
        self._paths = paths
        self._clock = clock
        self._observer = observer
        self._entries: dict[str, _Entry] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> dict[str, ServedModel]:
        return {name: one.model for name, one in self._entries.items() if one.model is not None}

    def find(self, name: str) -> ServedModel:
        """Raises ModelNotFound, EngineUnavailable."""
        entry = self._entries.get(name)
        if entry is None or (entry.model is None and entry.state != "LOADING"):
            self._refuse(name, entry)
        if entry.model is None:
            raise EngineUnavailable(f"the model '{name}' is being loaded", retry_after_s=5.0)
        return entry.model

    async def load_all(self) -> None:
        """Loads all models. One that cannot be loaded does not affect others. Raises the first error if none can."""
        first: PenstockError | None = None
        for name in self._paths():
            self._entries.setdefault(name, _Entry()).state = "LOADING"
        for name in self._paths():
            try:
                await self.load(name)
            except PenstockError as error:
                first = first or error
        if first is not None and not self.loaded:
            raise first

    async def load(self, name: str, settings: ModelSettings | None = None) -> None:
        """`settings`: instead of its file's. Raises ModelNotFound, ModelError, ConfigError; then nothing changed."""
        path = self._paths().get(name)
        if path is None:
            self._refuse(name, None)
        entry = self._entries.setdefault(name, _Entry())
        async with entry.lock:
            if entry.model is None:
                entry.state = "LOADING"
            try:
                loaded = await asyncio.to_thread(lambda: loading.load(open_directory(str(path), settings), self._place))
            except PenstockError as error:
                entry.reason = error.message
                raise
            else:
                entry.reason = ""
                old, entry.model = entry.model, loading.serve(name, loaded, self._clock, self._observer)
            finally:
                entry.state = "UNAVAILABLE" if entry.model is None else "READY"
        if old is not None:
            self._retire(old)

    async def unload(self, name: str) -> None:
        """Lets what it has begun end. Raises ModelNotFound."""
        entry = self._entries.get(name)
        if entry is None or entry.model is None:
            self._refuse(name, entry)
        async with entry.lock:
            model, entry.model = entry.model, None
            if model is None:
                return
            entry.state, entry.reason = "UNLOADING", "unloaded"
            try:
                await asyncio.shield(self._retire(model))  # it ends though nobody waits for the answer any more
            finally:
                entry.state = "UNAVAILABLE"

    def index(self, *, only_ready: bool = False) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys([*self._paths(), *self.loaded]):
            entry = self._entries.get(name)
            if entry is not None and entry.model is not None:
                rows += [
                    {"name": name, "version": str(number), "state": "READY", "reason": entry.reason}
                    for number in entry.model.versions
                ]
            elif not only_ready:
                state, reason = ("UNAVAILABLE", "not loaded") if entry is None else (entry.state, entry.reason)
                rows.append({"name": name, "version": "", "state": state, "reason": reason})
        return rows

    def stop(self) -> None:
        for model in self.loaded.values():
            model.stop()

    def _retire(self, model: ServedModel) -> asyncio.Task[None]:
        task = asyncio.create_task(model.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        return task

    def _refuse(self, name: str, entry: _Entry | None) -> NoReturn:
        if name in self._paths() or entry is not None:
            reason = "not loaded" if entry is None else entry.reason
            raise ModelNotFound(f"the model '{shown(name)}' is not loaded: {reason}", param="model")
        has = ", ".join(f"'{one}'" for one in list(self._entries)[:20]) or "none"
        raise ModelNotFound(f"no model '{shown(name)}'; this server has {has}", param="model")
