"""The target of what is pushed, and its sender: the settings, and OpenTelemetry's environment variables for the rest.

Pure: the environment is an argument. A value that cannot be meant is a ConfigError that names the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from penstock.core.errors import ConfigError
from penstock.core.settings import TelemetrySettings
from penstock.observe.spans import Sampling

Signal = Literal["traces", "metrics"]
Environment = Mapping[str, str]

_GRPC_PORT = 4317
_PROTOCOLS = ("http/protobuf", "grpc")
_MAX_TIMEOUT_S = 60.0


class Target(NamedTuple):
    """The target of one kind of news."""

    url: str  # of http/protobuf the whole, of grpc the server's
    protocol: str
    headers: dict[str, str]
    timeout_s: float
    is_gzipped: bool
    certificate: str | None  # a file with whom to trust


class Telemetry(NamedTuple):
    traces: Target | None
    metrics: Target | None
    metrics_every_s: float
    sampling: Sampling
    resource: dict[str, str]  # who says it


def telemetry(settings: TelemetrySettings, service: str, environment: Environment) -> Telemetry:
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    interval = environment.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return Telemetry(
        _target("traces", settings, environment) if settings.traces and not is_off else None,
        _target("metrics", settings, environment) if settings.metrics and not is_off else None,
        settings.metrics_every_s or _seconds(interval, "OTEL_METRIC_EXPORT_INTERVAL", 60.0),
        _sampling(settings, environment),
        _resource(settings, service, environment),
    )


def _target(signal: Signal, settings: TelemetrySettings, environment: Environment) -> Target | None:
    def find(name: str) -> str:
        """Returns the variable of this kind of news, or of all."""
        own = environment.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", "")
        return own or environment.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    exporter = environment.get(f"OTEL_{signal.upper()}_EXPORTER", "otlp")
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise ConfigError(f"OTEL_{signal.upper()}_EXPORTER is '{exporter}'; penstock knows otlp and none")
    own = environment.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "")
    endpoint = settings.endpoint or own or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint:
        return None
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(
            f"'{endpoint}' is no address of an OTLP receiver: http://host:4318", param="telemetry.endpoint"
        )
    protocol = find("PROTOCOL") if settings.protocol == "auto" else settings.protocol
    protocol = protocol or ("grpc" if port == _GRPC_PORT else "http/protobuf")
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is '{protocol}'; penstock speaks {' and '.join(_PROTOCOLS)}")
    url = parts.geturl()
    if protocol != "grpc" and (settings.endpoint or not own):  # a signal's own endpoint is used as it is
        url = f"{url.rstrip('/')}/v1/{signal}"
    timeout_s = _seconds(find("TIMEOUT"), "OTEL_EXPORTER_OTLP_TIMEOUT", 10.0)
    return Target(
        url,
        protocol,
        _pairs(find("HEADERS"), "OTEL_EXPORTER_OTLP_HEADERS"),
        min(timeout_s, _MAX_TIMEOUT_S),
        find("COMPRESSION") == "gzip",
        find("CERTIFICATE") or None,
    )


def _sampling(settings: TelemetrySettings, environment: Environment) -> Sampling:
    sampler = environment.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    kind, argument = sampler.removeprefix("parentbased_"), environment.get("OTEL_TRACES_SAMPLER_ARG", "")
    match kind:
        case "always_on":
            ratio = 1.0
        case "always_off":
            ratio = 0.0
        case "traceidratio":
            ratio = _ratio(argument)
        case _:
            known = "always_on, always_off and traceidratio, each also with parentbased_"
            raise ConfigError(f"OTEL_TRACES_SAMPLER is '{sampler}'; penstock knows {known}")
    return Sampling(
        ratio if settings.sample is None else settings.sample,
        sampler.startswith("parentbased_") or settings.sample is not None,
        settings.continue_traces,
        settings.slow_ttft_s,
        settings.slow_s,
    )


def _resource(settings: TelemetrySettings, service: str, environment: Environment) -> dict[str, str]:
    found = _pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES")
    name = settings.service_name or environment.get("OTEL_SERVICE_NAME")
    return {"service.name": service} | found | ({"service.name": name} if name else {})


def _pairs(text: str, variable: str) -> dict[str, str]:
    """`key=value,key=value`, with percent signs for what has a meaning there."""
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = entry.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{variable} is not of the form key=value,key=value")  # it may hold a secret
        found[unquote(key.strip())] = unquote(value.strip())
    return found


def _ratio(text: str) -> float:
    try:
        ratio = float(text or 1.0)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG is '{text}', which is no share from 0 to 1")
    return ratio


def _seconds(text: str, variable: str, default_s: float) -> float:
    """Returns the seconds of a number of milliseconds."""
    if not text:
        return default_s
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{variable} is '{text}', which is no number of milliseconds")
    return int(text) / 1e3
