"""Progress of a start, phase by phase, so that nobody thinks it hangs: bars on a terminal, else lines if it takes a
while."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.clock import Clock
from penstock.engine.messages import Loading
from penstock.terminal.progress import PhaseBars

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


class LoadingProgress:
    def __init__(self, clock: Clock, write: Callable[[str], None], bars: PhaseBars | None = None) -> None:
        """`bars`: on a terminal, for the first start. Later ones, of an engine that died, are told in lines."""
        self._clock = clock
        self._write = write
        self._bars = bars
        self._began_s = clock.now()
        self._phase = ""
        self._written_s = self._began_s

    def __call__(self, message: Loading) -> None:
        described = _DESCRIPTIONS.get(message.phase, message.phase)
        if self._bars is not None:
            self._bars.show(described, message.done, message.total)
            return
        now_s = self._clock.now()
        if now_s - self._began_s < _QUIET_S:
            return
        if message.phase == self._phase and now_s - self._written_s < _PAUSE_S:
            return
        self._phase, self._written_s = message.phase, now_s
        part = f", {message.done} of {message.total}" if message.total else ""
        self._write(f"{now_s - self._began_s:5.0f} s  {described}{part}")

    def end(self, *, is_ready: bool) -> None:
        """The first start is over, or came to nothing."""
        if self._bars is not None:
            (self._bars.finish if is_ready else self._bars.close)()
            self._bars = None
