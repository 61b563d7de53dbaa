"""The gateway of a fleet on one machine: a process that outlives the controller, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from penstock.api.relay import SECRET_VARIABLE
from penstock.core.private_files import make_private
from penstock.fleet.drivers.process import ManagedProcess
from penstock.gateway.settings.gateway import GatewaySettings

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 30.0


class GatewayKeeper:
    def __init__(self, directory: Path, settings: GatewaySettings, secret: str) -> None:
        self._process = ManagedProcess(directory / "process")
        self._config = directory / "process" / "gateway.json"
        self._content = msgspec.json.encode(asdict(settings))
        self._secret = secret

    @property
    def log_path(self) -> Path:
        return self._process.log_path

    async def run(self, is_leader: Callable[[], bool]) -> None:
        """Runs until it is cancelled; the gateway goes on. Of several controllers the leader looks after it."""
        wait_s = _FIRST_WAIT_S
        while True:
            if is_leader() and not self._process.is_running:
                if self._process.has_begun:
                    log.warning("the gateway has ended: %s; it is started again", self._process.last_words())
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _MAX_WAIT_S)
                    await self._process.stop(0.0)
                await self._start()
            elif is_leader() and self._config.exists() and self._config.read_bytes() != self._content:
                self._config.write_bytes(self._content)
                if (pid := self._process.pid) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGHUP)
            await asyncio.sleep(_LOOK_S)

    async def stop(self, grace_s: float) -> None:
        await self._process.stop(grace_s)

    async def _start(self) -> None:
        make_private(self._config.parent)
        self._config.write_bytes(self._content)
        environment = {**os.environ, SECRET_VARIABLE: self._secret}
        await self._process.start("penstock.cli.main", ["gateway", "--config", str(self._config)], environment)
