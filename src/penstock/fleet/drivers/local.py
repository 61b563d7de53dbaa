"""Replicas as processes of this machine. They outlive their controller: the next one finds them by their directories.

DIRECTORY/REPLICA/replica.json   what it is, written first
                  config.json    its settings
                  address.json   its URL, written by the replica when it listens
                  notice         an interruption notice: seconds since 1970 at which it is taken away
                  log, lock      see `process`
DIRECTORY/../cordoned/NAME       a zone or capacity type in which nothing is started
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from penstock.api.relay import SECRET_VARIABLE
from penstock.core.errors import CapacityRefused, ConfigError, ReplicaNotFound
from penstock.core.private_files import make_private, open_private
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.drivers.process import ManagedProcess, Spawn, execute
from penstock.fleet.policy.observation import CapacityType

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _Kept:
    """replica.json"""

    pool: str
    zone: str
    capacity_type: CapacityType
    gpus: list[int]


_kept_decoder = msgspec.json.Decoder(_Kept)


class LocalDriver:
    def __init__(
        self,
        directory: Path,
        secret: str,
        *,
        gpus: Sequence[int] = (),
        spawn: Spawn = execute,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`gpus`: the machine's, which replicas share out. `spawn`: how their processes are started."""
        self._directory = directory
        self._secret = secret
        self._gpus = gpus
        self._spawn = spawn
        self._clock = clock
        self._processes: dict[str, ManagedProcess] = {}
        self._lister = ThreadPoolExecutor(1)  # a disk that hangs takes this thread only, however often it is asked
        make_private(directory)

    async def start(self, spec: ReplicaSpec) -> None:
        process = self._process(spec.id)
        path = process.directory
        if process.has_begun:
            return
        for name in (spec.zone, spec.capacity_type):
            if name and (_cordons(self._directory) / name).exists():
                raise CapacityRefused(f"{name} is cordoned")
        kept = _Kept(spec.pool, spec.zone, spec.capacity_type, [*self._free_gpus(spec)])
        make_private(path)
        _write(path / "replica.json", msgspec.json.encode(kept))
        settings = spec.settings
        server = replace(settings.server, host=_LOOPBACK, port=0, gateway_secret=None)
        _write(path / "config.json", msgspec.json.encode(asdict(replace(settings, server=server))))
        environment = {**os.environ, SECRET_VARIABLE: self._secret}
        if kept.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, kept.gpus))
        arguments = ["engine", "--address-file", str(path / "address.json"), "--config", str(path / "config.json")]
        await process.start("penstock.cli.main", [*arguments, "--log-level", "warning"], environment, self._spawn)

    async def stop(self, replica_id: str, grace_s: float) -> None:
        await self._process(replica_id).stop(grace_s)
        self._processes.pop(replica_id, None)

    async def list(self) -> Sequence[DriverReplica]:
        return await asyncio.get_running_loop().run_in_executor(self._lister, self._list)

    async def close(self) -> None:
        self._lister.shutdown(wait=False)

    def interrupt_spot(self, seconds: float) -> None:
        """The machine is taken away: a notice for every replica on spot capacity that has none yet."""
        for one in self._list():
            if one.capacity_type is CapacityType.SPOT and one.deadline_s is None:
                _write_notice(self._directory / one.id, self._clock() + seconds)

    def _list(self) -> Sequence[DriverReplica]:
        paths = sorted(self._directory.iterdir())
        return [self._look(path, kept) for path in paths if (kept := _read_kept(path)) is not None]

    def _look(self, path: Path, kept: _Kept) -> DriverReplica:
        process = self._process(path.name)
        url, failure = _url(path), ""
        deadline_s = self._seconds_left(path)
        if deadline_s is not None and deadline_s <= 0:
            process.kill()
        if process.has_begun and not process.is_running:
            failure = process.last_words() or "its process ended without a word"
        return DriverReplica(path.name, kept.pool, url, kept.zone, kept.capacity_type, failure, deadline_s)

    def _seconds_left(self, path: Path) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return float((path / "notice").read_text()) - self._clock()
        return None

    def _free_gpus(self, spec: ReplicaSpec) -> Sequence[int]:
        if not spec.gpus:
            return []
        taken: set[int] = set()
        for path in self._directory.iterdir():
            if (kept := _read_kept(path)) is not None:
                taken |= set(kept.gpus)
        free = [gpu for gpu in self._gpus if gpu not in taken]
        if len(free) < spec.gpus:
            raise CapacityRefused(f"a replica of {spec.pool} needs {spec.gpus} GPUs, and {len(free)} are free")
        return free[: spec.gpus]

    def _process(self, replica_id: str) -> ManagedProcess:
        found = self._processes.get(replica_id)
        if found is None:
            found = self._processes[replica_id] = ManagedProcess(self._directory / replica_id)
        return found


def interrupt(fleets: Path, named: str, seconds: float) -> str:
    """An interruption notice for a replica of this machine, by its id or URL: it is killed when the time is over.
    `fleets`: directory above those of all fleets. Returns its id."""
    for path in fleets.glob("*/replicas/*"):
        if named in (path.name, _url(path)):
            _write_notice(path, time.time() + seconds)
            return path.name
    raise ReplicaNotFound(f"no fleet of this machine has a replica {named}")


def cordon(fleets: Path, name: str, *, drained_in_s: float | None = None) -> list[str]:
    """No fleet of this machine starts replicas in this zone, or of this capacity type, any more. `drained_in_s`: those
    that are there get interruption notices. Returns the ids of these."""
    if not name or Path(name).name != name:
        raise ConfigError("name a zone, or a capacity type", param="name")
    drained = []
    for directory in fleets.glob("*/replicas"):
        cordons = _cordons(directory)
        make_private(cordons)
        _write(cordons / name, b"")
        if drained_in_s is None:
            continue
        for path in directory.iterdir():
            kept = _read_kept(path)
            if kept is not None and name in (kept.zone, kept.capacity_type):
                _write_notice(path, time.time() + drained_in_s)
                drained.append(path.name)
    return drained


def uncordon(fleets: Path, name: str) -> None:
    for directory in fleets.glob("*/replicas"):
        (_cordons(directory) / name).unlink(missing_ok=True)


def _cordons(directory: Path) -> Path:
    return directory.parent / "cordoned"


def _read_kept(path: Path) -> _Kept | None:
    """None: its start has not come so far."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _kept_decoder.decode((path / "replica.json").read_bytes())
    return None


def _write_notice(path: Path, at: float) -> None:
    _write(path / "notice", str(at).encode())


def _url(path: Path) -> str:
    with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
        return str(msgspec.json.decode((path / "address.json").read_bytes())["url"])
    return ""


def _write(path: Path, data: bytes) -> None:
    """Writes the file at once or not at all."""
    draft = path.with_suffix(".tmp")
    with open_private(draft, "wb") as file:
        file.write(data)
    draft.rename(path)
