"""Progress of a start that takes a while: a line for each phase, so that nobody thinks it hangs."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.clock import Clock
from penstock.engine.messages import Loading

_QUIET_S = 3.0  # a start that is over by then says nothing
_PAUSE_S = 5.0  # between two lines about the same phase
_DESCRIPTIONS = {
    "import": "importing torch",
    "files": "reading the model's description",
    "kernels": "preparing kernels",
    "weights": "reading weights",
    "profile": "measuring a step; on a GPU kernels are compiled, once on a machine",
    "cache": "making the KV cache",
    "graphs": "recording CUDA graphs",
    "engine": "putting the engine together",
}


class LoadingLines:
    def __init__(self, clock: Clock, write: Callable[[str], None]) -> None:
        self._clock = clock
        self._write = write
        self._began_s = clock.now()
        self._phase = ""
        self._written_s = self._began_s

    def __call__(self, message: Loading) -> None:
        now_s = self._clock.now()
        if now_s - self._began_s < _QUIET_S:
            return
        if message.phase == self._phase and now_s - self._written_s < _PAUSE_S:
            return
        self._phase, self._written_s = message.phase, now_s
        part = f", {message.done} of {message.total}" if message.total else ""
        self._write(f"{now_s - self._began_s:5.0f} s  {_DESCRIPTIONS.get(message.phase, message.phase)}{part}")
