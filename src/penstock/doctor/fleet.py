"""Checks of what a gateway needs around it: ports, the store, the limiter, replicas and providers, an OTLP receiver.

Replicas are asked as anybody could; nothing is generated and nothing changed.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock import __version__
from penstock.api import relay
from penstock.api.replica_report import decode
from penstock.core.errors import PenstockError
from penstock.doctor.findings import Finding, fail, ok, warn
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, pools_of, tls_of
from penstock.http.ask import Answered, ask
from penstock.http.tls import expiry
from penstock.observe.otlp.target import Telemetry
from penstock.observe.redaction import redact

if TYPE_CHECKING:
    from penstock.tenancy.database import Execute

_TIMEOUT_S = 3.0
_DAY_S = 86400.0
_ENDS_SOON_S = 14 * _DAY_S
SKEW_S = 2.0  # of clocks; a Date header is told in whole seconds


def port(host: str, number: int, setting: str) -> Iterator[Finding]:
    if number == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            hint = f"something listens there already (penstock itself?); else set {setting} to another"
            yield warn("port", f"{host}:{number} cannot be had: {error.strerror}", hint)
            return
    yield ok("port", f"{host}:{number} is free")


def certificate(cert_file: str, now_s: float | None = None) -> Iterator[Finding]:
    """Whether it ends soon."""
    left_s = expiry(cert_file) - (time.time() if now_s is None else now_s)
    hint = "renew it; a process that runs finds the new one by itself"
    if left_s <= 0:
        yield fail("certificate", f"{cert_file} has ended", hint)
    elif left_s < _ENDS_SOON_S:
        yield warn("certificate", f"{cert_file} ends in {left_s // _DAY_S:.0f} days", hint)
    else:
        yield ok("certificate", f"{cert_file} is good for {left_s // _DAY_S:.0f} days")


def store(url: str) -> Iterator[Finding]:
    from penstock.tenancy.migrations import MIGRATIONS

    shown, path = redact(url), _path_of(url)
    if path is not None and not path.exists():
        yield ok("store", f"{shown} is not there yet; the first command makes it")
        return
    try:
        with _reading(url) as execute:
            done, unreadable = _look(execute)
    except (PenstockError, sqlite3.Error) as error:
        said = redact(error.message if isinstance(error, PenstockError) else str(error))
        yield fail("store", f"{shown}: {said}", "is it running, is the URL right, may this user read it?")
        return
    if done > len(MIGRATIONS):
        yield fail("store", f"{shown} has schema {done}, made by a newer penstock", "upgrade this one")
    elif done < len(MIGRATIONS):
        yield warn(
            "store", f"{shown} has schema {done} of {len(MIGRATIONS)}", "the next gateway or command migrates it"
        )
    elif unreadable:
        first, why = next(iter(unreadable.items()))
        whose = f"'{first}'" if len(unreadable) == 1 else f"'{first}' and {len(unreadable) - 1} more"
        hint = "until it is mended, or removed with `penstock tenants remove`, its keys are refused"
        yield fail("store", f"{shown} answers, but tenant {whose} cannot be read: {why}", hint)
    else:
        yield ok("store", f"{shown} answers, schema {done}")


def _look(execute: Execute) -> tuple[int, dict[str, str]]:
    """The schema, and of one that this version knows the tenants that cannot be read, and why."""
    from penstock.tenancy.migrations import MIGRATIONS
    from penstock.tenancy.store import unreadable_tenants

    done = int(execute("SELECT COALESCE(MAX(version), 0) FROM migrations")[0][0])
    return done, unreadable_tenants(execute) if done == len(MIGRATIONS) else {}


def fleets_seen(url: str) -> dict[str, float]:
    """Fleets that the store knows, and how many seconds ago a controller of each has written. What is wrong with the
    store itself, `store` says: then none is known."""
    from penstock.tenancy.fleet import pool_status_decoder

    path = _path_of(url)
    if not url or (path is not None and not path.exists()):
        return {}
    try:
        with _reading(url) as execute:
            rows = execute("SELECT document FROM fleet_pools")
    except (PenstockError, sqlite3.Error):
        return {}
    seen: dict[str, float] = {}
    for (document,) in rows:
        pool = pool_status_decoder.decode(document)
        seen[pool.fleet] = min(time.time() - pool.at, seen.get(pool.fleet, math.inf))
    return seen


def store_places(url: str) -> list[tuple[str, int]]:
    """Hosts and ports of a store that other machines can reach; none: it is a file of this one."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql"):
        return []
    found = []
    for place in parts.netloc.rpartition("@")[2].split(","):  # a URL may name several servers
        one = urlsplit(f"//{place}")
        if one.hostname:
            found.append((one.hostname, one.port or 5432))
    return found


def _path_of(url: str) -> Path | None:
    """The file of a store; None: it is a server's."""
    scheme, _, rest = url.partition("://")
    return Path(rest[1:]).expanduser() if scheme == "sqlite" else None


@contextlib.contextmanager
def _reading(url: str) -> Iterator[Execute]:
    """Opens the store read-only: to look must not make a file, nor write to one."""
    from penstock.tenancy.store import open_database

    if (path := _path_of(url)) is None:
        with contextlib.closing(open_database(url)) as database, database.reading() as execute:
            yield execute
        return
    with contextlib.closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True, timeout=_TIMEOUT_S)) as found:
        yield lambda sql, parameters=(): found.execute(sql, tuple(parameters)).fetchall()


def limiter(url: str) -> Iterator[Finding]:
    try:
        import redis
    except ImportError:
        return  # `packages` says so
    shown = redact(url)
    try:
        with redis.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S) as found:
            found.ping()
    except (redis.RedisError, ValueError) as error:
        yield fail("limiter", f"{shown}: {redact(str(error))}", "is Redis running, and is `limiter` right?")
    else:
        yield ok("limiter", f"{shown} answers")


def receiver(found: Telemetry) -> Iterator[Finding]:
    target = found.traces or found.metrics
    if target is None:
        return
    parts = urlsplit(target.url)
    number = parts.port or {"https": 443}.get(parts.scheme, 4317 if target.protocol == "grpc" else 80)
    try:
        with socket.create_connection((str(parts.hostname), number), _TIMEOUT_S):
            yield ok("telemetry", f"{redact(target.url)} takes connections ({target.protocol})")
    except OSError as error:
        yield warn(
            "telemetry", f"{redact(target.url)}: {error}", "nothing waits for it, but traces and metrics are lost"
        )


def replicas(settings: GatewaySettings) -> Iterator[Finding]:
    """Every one that the gateway's file names."""
    models = settings.pools()
    for name, pool in pools_of(models).items():
        secret = os.environ.get(pool.secret_env, "") if pool.secret_env else ""
        for url in pool.urls:
            yield _paid(name, url) if pool.key_env else replica(name, url, pool, secret, pool.served_as or name)


def _paid(model: str, url: str) -> Finding:
    """Somebody else's: that it can be reached is all that is asked."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((str(parts.hostname), parts.port or 443), _TIMEOUT_S):
            return ok("replica", f"{redact(url)} ({model}) can be reached")
    except OSError as error:
        return fail("replica", f"{redact(url)} ({model}): {error}", "is the network open towards it?")


def replica(model: str, url: str, pool: ModelSettings, secret: str, served: str | None) -> Finding:
    """`served`: the name that it must know its model by; None: any."""
    who = f"{redact(url)} ({model})"
    try:
        own = {relay.SECRET_HEADER: secret} if secret else {}
        status, headers, body = _ask(url, model, pool, "/v1/penstock/snapshot", own)
    except (OSError, http.client.HTTPException) as error:
        return fail("replica", f"{who}: {error}", "is it running, and is the address right?")
    skew = skew_s(headers.get("date"))
    if abs(skew) > SKEW_S:
        return warn(
            "replica", f"{who}: its clock differs by {skew:+.0f} s", "run NTP on both: logs and traces mix them"
        )
    if status == 403:
        return fail(
            "replica", f"{who} wants its gateway's secret", f"set models.{model}.secret_env to a variable with it"
        )
    if status != 200:
        return _foreign(who, url, model, pool)
    report = decode(body)
    says = f"{who}: {report.shown_state}, penstock {report.version}"
    if served is not None and report.model and report.model != served:
        return fail("replica", f"{who} serves {report.model}, not {served}", f"set models.{model}.served_as")
    if fault := report.measured.device.device_fault:
        return fail("replica", f"{who}: {fault}", "see docs/gpu.md")
    if report.state != "ready" or report.is_draining:
        return warn("replica", says, "it gets no work now")
    if report.version != __version__:
        return warn("replica", f"{says}; this is {__version__}", "fine for a while, as in an upgrade")
    return ok("replica", says)


def _foreign(who: str, url: str, model: str, pool: ModelSettings) -> Finding:
    try:
        status, _, _ = _ask(url, model, pool, "/v1/models", {})
    except (OSError, http.client.HTTPException) as error:
        return fail("replica", f"{who}: {error}", "is it running, and is the address right?")
    if status == 200:
        return ok("replica", f"{who} answers; it is not penstock's")
    return warn(
        "replica", f"{who} answers /v1/models with {status}", "does it want a key (key_env)? is the path right?"
    )


def _ask(url: str, model: str, pool: ModelSettings, path: str, headers: dict[str, str]) -> Answered:
    tls, name = tls_of(model, pool), pool.server_name
    return ask(url, "GET", path, headers=headers, timeout_s=_TIMEOUT_S, tls=tls, server_name=name)


def skew_s(date: str | None) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time.time() if date else 0.0
    except ValueError:
        return 0.0
