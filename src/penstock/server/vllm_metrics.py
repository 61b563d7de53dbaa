"""A replica's numbers under vLLM's names, taken down when somebody looks."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.engine.client import EngineClient
from penstock.observe import vllm_catalog as catalog
from penstock.observe.registry import Registry
from penstock.server.served_model import ServedAdapter


class VllmMetrics:
    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model
        self._registry = Registry(catalog.VLLM_CATALOG)
        self.adapters: Mapping[str, ServedAdapter] = {}  # by name, once the model is open
        self.exposition = self._registry.exposition

    def look(self) -> None:
        engine, info, count = self._engine, self._engine.info, self._registry.count
        if info is None:
            return
        measured = replace(engine.measured, limits=info.limits)
        count(catalog.RUNNING, self._model).value = measured.load.num_running
        count(catalog.WAITING, self._model).value = measured.load.num_waiting
        count(catalog.KV_USAGE, self._model).value = measured.kv_usage
        size = max(1, info.limits.block_size)
        blocks = info.limits.kv_capacity_tokens // size
        self._registry.replace(catalog.CACHE_CONFIG, {(str(size), str(blocks)): 1})
        if info.max_loras:
            on_device = set(engine.adapters.device)
            names = ",".join(sorted(name for name, one in self.adapters.items() if one.digest in on_device))
            self._registry.replace(catalog.LORA_REQUESTS, {(str(info.max_loras), names, ""): time.time()})
