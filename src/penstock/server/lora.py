"""The adapters of a served model: by which names clients may ask for them, and how they come and go.

A name stands for content: it is read and named by its digest before the engine is asked to have it. Names that were
loaded by hand are kept in a file and are there again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.core.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    PenstockError,
)
from penstock.engine.client import EngineClient
from penstock.engine.lora_client import LoraClient
from penstock.hub.lora_file import AdapterFile, StoredAdapter
from penstock.hub.peft import read_peft
from penstock.observe import catalog
from penstock.observe.registry import Registry
from penstock.server.served_model import ServedAdapter, ServedModel

log = logging.getLogger("penstock.server")

_NAME = re.compile(r"[^\s\x00-\x1f\x7f*?\[\]]{1,200}")  # no patterns: tenants are allowed names by patterns


class Adapters:
    def __init__(self, model: ServedModel, engine: EngineClient, file: AdapterFile) -> None:
        self._model = model
        self._engine = engine
        self._file = file
        self._turn = asyncio.Lock()  # names change one at a time

    async def load(self, name: str, path: str, *, pinned: bool = False, in_place: bool = False) -> ServedAdapter:
        """Serve the adapter in this directory under this name, now and after restarts."""
        async with self._turn:
            adapter = await self._load(name, path, pinned=pinned, in_place=in_place)
            await self._note(self._file.put, name, StoredAdapter(adapter.path, pinned))
        log.info("adapter %s (rank %d) is loaded from %s", name, adapter.rank, adapter.path)
        return adapter

    async def unload(self, name: str) -> None:
        """No new request may ask for it; returns when the last one that runs has ended."""
        async with self._turn:
            adapter = self._model.adapters.pop(name, None)
            if adapter is None:
                raise ModelNotFound(f"no adapter '{name}' is loaded", param="lora_name")
            await self._note(self._file.remove, name)
        await self._drop(adapter)
        log.info("adapter %s is unloaded", name)

    async def _note(self, change: Callable[..., None], *arguments: object) -> None:
        """Notes a change in the file; what is served is served, also where the file cannot be written."""
        try:
            await asyncio.to_thread(change, *arguments)
        except ConfigError as error:
            log.warning("%s: after a restart adapters are as they were before this change", error.message)

    async def restore(self, given: Mapping[str, str]) -> None:
        """Loads at start the adapters given, which must be had, and those of the file, as far as they can be."""
        for name, path in given.items():
            await self._load(name, path)
        if self._model.max_loras == 0:
            return
        try:
            stored = await asyncio.to_thread(self._file.read)
        except ConfigError as error:
            log.error("no adapters are restored: %s", error.message)
            return
        for name, adapter in stored.items():
            if name in given:
                continue
            try:
                await self._load(name, adapter.path, pinned=adapter.pinned)
            except PenstockError as error:
                log.error("adapter %s is not restored: %s", name, error.message)

    async def _load(self, name: str, path: str, *, pinned: bool = False, in_place: bool = False) -> ServedAdapter:
        self._check_name(name)
        if self._model.max_loras == 0:
            raise ModelUnsupported(
                "this engine runs no adapters: max_loras is 0, or auto on a GPU that was started without any; "
                "start it with max_loras"
            )
        found = await asyncio.to_thread(read_peft, Path(path))
        before = self._model.adapters.get(name)
        if before is not None and before.digest != found.digest and not in_place:
            raise Conflict(f"'{name}' is another adapter, from {before.path}; unload it, or say load_inplace")
        where = str(found.path.resolve())
        adapter = ServedAdapter(name, where, found.digest, found.rank, pinned, int(time.time()))
        try:
            await self._engine.adapters.load(found.digest, where, pinned=pinned)
        except Conflict:  # it has the adapter, and no room to pin it
            await self._drop(adapter)
            raise
        self._model.adapters[name] = adapter
        if before is not None and before.digest != found.digest:
            asyncio.ensure_future(self._drop(before)).add_done_callback(_tell_failure)
        return adapter

    async def _drop(self, adapter: ServedAdapter) -> None:
        """Unless another name stands for the same content."""
        if all(other.digest != adapter.digest for other in self._model.adapters.values()):
            await self._engine.adapters.unload(adapter.digest)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("lora_name: 1 to 200 characters, no spaces and none of *?[]", param="lora_name")
        if name == self._model.name:
            raise Conflict(f"'{name}' is the name of the base model", param="lora_name")


def _tell_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an adapter that was replaced could not be dropped: %s", error)


def tally(registry: Registry, desk: LoraClient) -> None:
    """Take down how things stand."""
    for place, number in {"loaded": desk.num_loaded, "host": len(desk.host), "device": len(desk.device)}.items():
        registry.count(catalog.LORA_ADAPTERS, place).value = number
    registry.count(catalog.LORA_SWAPS).value = desk.swaps
    registry.count(catalog.LORA_READS).value = desk.reads


def as_refusal(error: ModelError) -> InvalidRequest:
    """An adapter that cannot be used is the fault of whoever named it."""
    return InvalidRequest(error.message, param="lora_path", reason=error.code)
