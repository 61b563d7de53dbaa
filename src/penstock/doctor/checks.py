"""Everything that `penstock doctor` looks at, in its order; a check that breaks is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

from penstock.core.config import build
from penstock.core.config_file import ConfigFile
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.settings import Settings, TelemetrySettings
from penstock.doctor import cluster, fleet, machine, ray
from penstock.doctor.cluster import ClusterUse
from penstock.doctor.findings import Finding, fail, ok
from penstock.doctor.ray import RayUse
from penstock.fleet.settings import FleetSettings
from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.settings.gateway import GatewaySettings, router_of, routes_of
from penstock.gateway.settings.monitor import slack_of, slos_of
from penstock.observe.otlp.environment import telemetry_of

Check = Callable[[], Iterator[Finding]]


def look_over(
    model: str | None,
    read_config: Callable[[], ConfigFile] | None,
    store: str | None,
    default_store: str,
    use: ClusterUse | RayUse | None = None,
    chosen: Mapping[str, str | None] | None = None,
) -> Iterator[Finding]:
    """The configuration is a gateway's, a fleet's or a replica's; what it names is looked at as well. `use`: of a
    cluster that no configuration says. `chosen`: a fleet's settings, instead of the file's."""
    for check in (machine.python, machine.open_files, machine.disk):
        yield from _guarded(check)
    file: ConfigFile | None = None
    if read_config is not None:
        try:
            file = read_config()
        except ConfigError as error:
            yield fail("config", error.message)
            return
    is_gateway = file is not None and "models" in file.values
    is_fleet = file is not None and "pools" in file.values
    if file is not None and is_gateway:
        yield from _gateway(file, store, default_store)
    elif file is not None and is_fleet:
        yield from _fleet(file, store, default_store, chosen or {})
    if isinstance(use, ClusterUse):
        yield from _guarded(lambda: cluster.cluster(use))
    elif isinstance(use, RayUse) and not is_fleet:  # a fleet's file says more
        yield from _guarded(lambda: ray.cluster(use))
    if model is not None or not (is_gateway or is_fleet or use is not None):
        yield from _engine(None if is_gateway or is_fleet else file, model)


def _engine(file: ConfigFile | None, model: str | None) -> Iterator[Finding]:
    values = file.values if file else {}
    try:
        with file.located() if file else nullcontext():
            settings = build(Settings, values if model is None else values | {"model": model})
    except ConfigError as error:
        yield fail("config", error.message)
        return
    if file is not None and values:
        yield ok("config", f"{file.path} is a replica's, and valid")
    yield from _guarded(lambda: machine.device(settings.engine))
    yield from _guarded(lambda: machine.model(settings.model, settings.engine))
    yield from _guarded(lambda: fleet.port(settings.server.host, settings.server.port, "server.port"))
    if (cert_file := settings.server.tls_cert) is not None:
        yield from _guarded(lambda: fleet.certificate(cert_file))
    yield from _telemetry(settings.telemetry, "penstock-replica")


def _gateway(file: ConfigFile, store: str | None, default_store: str) -> Iterator[Finding]:
    try:
        with file.located():
            settings = build(GatewaySettings, file.values)
            models = settings.pools()
            routes_of(models)
            router_of(settings, models)
            replicas_of(models, settings.health)
            settings.tls()
            slos_of(settings.slo, models)
            slack_of(settings.watch.alerts)
    except PenstockError as error:
        yield fail("config", error.message)
        return
    yield ok("config", f"{file.path} is a gateway's, and valid: {', '.join(models)}")
    url = store or settings.store or default_store
    needed = {}
    if url.startswith(("postgres://", "postgresql://")):
        needed["psycopg"] = "penstock[postgres]"
    if settings.limiter_url is not None:
        needed["redis"] = "penstock[redis]"
    if any(model.kv_events is not None for model in models.values()):
        needed["zmq"] = "penstock[zmq]"
    yield from _guarded(lambda: machine.packages(needed))
    yield from _guarded(lambda: fleet.port(settings.host, settings.port, "port"))
    if settings.admin_port is not None:
        number = settings.admin_port
        yield from _guarded(lambda: fleet.port(settings.admin_host, number, "admin_port"))
    if (cert_file := settings.tls_cert) is not None:
        yield from _guarded(lambda: fleet.certificate(cert_file))
    yield from _guarded(lambda: fleet.store(url))
    if (limiter := settings.limiter_url) is not None:
        yield from _guarded(lambda: fleet.limiter(limiter))
    yield from _guarded(lambda: fleet.replicas(settings))
    if (use := cluster.use_of_gateway(settings)) is not None:
        yield from _guarded(lambda: cluster.cluster(use))
    yield from _telemetry(settings.telemetry, "penstock-gateway")


def _fleet(
    file: ConfigFile, store: str | None, default_store: str, chosen: Mapping[str, str | None]
) -> Iterator[Finding]:
    try:
        with file.located():
            given = {name: value for name, value in chosen.items() if value is not None}
            settings = build(FleetSettings, {**file.values, **given})
            pools = settings.pool_settings()
            url = store or settings.store or default_store
            on_kubernetes, on_ray = cluster.use_of_fleet(settings), ray.use_of_fleet(settings, url)
    except PenstockError as error:
        yield fail("config", error.message)
        return
    yield ok("config", f"{file.path} is a fleet's, and valid: {', '.join(pools)}")
    yield from _guarded(lambda: fleet.store(url))
    if on_kubernetes is not None:
        yield from _guarded(lambda: cluster.cluster(on_kubernetes))
    if on_ray is not None:
        yield from _guarded(lambda: ray.cluster(on_ray))


def _telemetry(settings: TelemetrySettings, service: str) -> Iterator[Finding]:
    try:
        found = telemetry_of(settings, service)
    except ConfigError as error:
        yield fail("telemetry", error.message)
        return
    target = found.traces or found.metrics
    if target is not None:
        needed = {"opentelemetry.proto": "penstock[otel]"} | (
            {"grpc": "penstock[otel]"} if target.protocol == "grpc" else {}
        )
        yield from _guarded(lambda: machine.packages(needed))
        yield from _guarded(lambda: fleet.receiver(found))


def _guarded(check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # one check that breaks must not hide what the others find
        yield fail("doctor", f"a check broke: {type(error).__name__}: {error}", "please report this")
