"""A thread that reads devices once a second and hands on what it read. A driver that hangs holds up nobody else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from penstock.core.devices import DeviceReading
from penstock.observe.background import outliving
from penstock.observe.gpu.source import DeviceSource

Take = Callable[[list[DeviceReading]], None]


class Sampling:
    """`take` is called in the thread."""

    def __init__(
        self, source: DeviceSource, take: Callable[[list[DeviceReading]], object], *, every_s: float = 1.0
    ) -> None:
        self._source = source
        self._take = take
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: a driver may never answer."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with outliving("device sampling"):
                readings = self._source.read()
                with contextlib.suppress(RuntimeError):  # whoever takes them has just closed
                    self._take(readings)
            self._stopped.wait(self._every_s)
        self._source.close()
