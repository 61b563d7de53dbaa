"""Parking on a CPU: the KV cache's pages go back to the system, weights stay where they are.

The cache's addresses stay too, so nothing that points there has to change: pages come again, zeroed, as they are
touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from time import perf_counter

from penstock.core.parking import MemoryChange
from penstock.model.batch import LayerState
from penstock.model.ops import LayerKV, Ops
from penstock.model.ops.memory import release
from penstock.runner.embedder import DecoderEmbedder


class CpuMemory:
    def __init__(
        self,
        ops: Ops,
        kv: Sequence[LayerKV],
        embedder: DecoderEmbedder,
        *,
        settling: Thread | None = None,
        states: Sequence[LayerState] = (),
    ) -> None:
        """`kv`: all layers of all models of the engine; `settling`: what takes their memory at this moment. `states`:
        recurrent ones: nobody has one while the engine is parked."""
        self._states = states
        self._ops = ops
        self._kv = kv
        self._embedder = embedder
        self._settling = settling

    def park(self) -> MemoryChange:
        began_s, before = perf_counter(), resident_bytes()
        if self._settling is not None:
            self._settling.join()
        release([part for layer in self._kv for part in layer.caches])
        release([part for layer in self._states for part in (layer.conv, layer.recurrent)])
        self._embedder.release()
        return MemoryChange({"release": perf_counter() - began_s}, max(0, before - resident_bytes()))

    def wake(self) -> MemoryChange:
        """The cache's memory is taken beside the first steps, as at the start."""
        began_s = perf_counter()
        self._settling = self._ops.settle_kv(self._kv)
        return MemoryChange({"settle": perf_counter() - began_s})


def resident_bytes() -> int:
    """Memory of this process that is not a file's on disk; 0: the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) << 10
