"""The driver that a fleet's settings name."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from penstock.api.relay import SECRET_VARIABLE
from penstock.core.config import within
from penstock.core.errors import ConfigError
from penstock.engine_process.spawn import spawn
from penstock.fleet.drivers.driver import Driver
from penstock.fleet.drivers.kubernetes import KubernetesDriver
from penstock.fleet.drivers.kubernetes_pod import check_group, pod_name
from penstock.fleet.drivers.local import LocalDriver
from penstock.fleet.drivers.ray import RayDriver
from penstock.fleet.drivers.ray_bundles import gpu_shares, told_nodes
from penstock.fleet.drivers.ray_process import RayProcess
from penstock.fleet.kubernetes_lease import KubernetesLeaseKeeper
from penstock.fleet.settings import FleetSettings
from penstock.http.kubernetes_api import KubernetesApi, check_client
from penstock.tenancy.fleet import FleetBook
from penstock.tenancy.lease import LeaseKeeper


def check_driver(settings: FleetSettings) -> None:
    """Raises if the driver lacks something here."""
    if settings.driver == "kubernetes":
        _check_kubernetes(settings)
    elif settings.driver == "ray":
        _check_ray(settings)


def open_driver(settings: FleetSettings, directory: Path, secret: str) -> Driver:
    """`directory` is the fleet's own on this machine, `secret` its replicas'."""
    if settings.driver == "kubernetes":
        return KubernetesDriver(settings, _api(settings))
    if settings.driver == "ray":
        ray = RayProcess(settings.address or "auto", settings.ray.namespace, directory / "ray.log")
        return RayDriver(settings, ray, secret)
    return LocalDriver(directory / "replicas", secret, gpus=_gpus(), spawn=spawn)


def open_lease(settings: FleetSettings, book: FleetBook) -> LeaseKeeper:
    """Belongs to the running event loop."""
    holder = f"{socket.gethostname()}-{secrets.token_hex(8)}"
    if settings.lease == "store" or (settings.lease == "auto" and settings.driver != "kubernetes"):
        return LeaseKeeper(book, settings.name, holder, settings.lease_s, time.monotonic)
    return KubernetesLeaseKeeper(
        _api(settings),
        pod_name(settings.name),
        *(book, settings.name, holder, settings.lease_s, time.monotonic),
    )


def _api(settings: FleetSettings) -> KubernetesApi:
    cluster = settings.kubernetes
    is_context = settings.driver == "kubernetes" and settings.address is not None
    return KubernetesApi(replace(cluster, context=settings.address) if is_context else cluster)


def _check_kubernetes(settings: FleetSettings) -> None:
    with within("driver"):
        check_client()
    for name, pool in settings.pool_settings().items():
        own = settings.kubernetes.of_pool(name, pool.kubernetes)
        if not own.image and not pool.advisory:
            raise ConfigError("pods need an image with penstock in it", param="kubernetes.image")
        with within(f"pools.{name}."):
            check_group(pool.engine, pool.gpus, own.nodes)
    if not os.environ.get(SECRET_VARIABLE):
        raise ConfigError(
            f"the controller of pods needs {SECRET_VARIABLE}, as the Secret '{settings.kubernetes.secret}' has it",
            param="kubernetes.secret",
        )


def _check_ray(settings: FleetSettings) -> None:
    if find_spec("ray") is None:
        raise ConfigError("the driver 'ray' needs Ray: pip install 'penstock[ray]'", param="driver")
    for name, pool in settings.pool_settings().items():
        own = settings.ray.of_pool(name, pool.ray)
        if own.place_timeout_s >= settings.driver_timeout_s:
            raise ConfigError("`place_timeout_s` must be less than `driver_timeout_s`", param="ray.place_timeout_s")
        with within(f"pools.{name}."):
            gpu_shares(pool.engine, pool.gpus, told_nodes(pool.engine, own) or 1)


def _gpus() -> Sequence[int]:
    found = Path("/proc/driver/nvidia/gpus")
    return range(len(list(found.iterdir()))) if found.is_dir() else ()
