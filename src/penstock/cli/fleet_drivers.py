"""The driver that a fleet's settings name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.engine_process.spawn import spawn
from penstock.fleet.drivers.driver import Driver
from penstock.fleet.drivers.local import LocalDriver
from penstock.fleet.settings import FleetSettings

DRIVERS = ("local",)


def check_driver(settings: FleetSettings) -> None:
    """Raises if this version has no such driver, or it lacks something here."""
    if settings.driver not in DRIVERS:
        raise ConfigError(f"the driver '{settings.driver}' is not part of this version", param="driver")


def open_driver(settings: FleetSettings, directory: Path, secret: str) -> Driver:
    """`directory` is the fleet's own on this machine, `secret` its replicas'."""
    return LocalDriver(directory / "replicas", secret, gpus=_gpus(), spawn=spawn)


def _gpus() -> Sequence[int]:
    found = Path("/proc/driver/nvidia/gpus")
    return range(len(list(found.iterdir()))) if found.is_dir() else ()
