"""Where to and as whom: the settings, and OpenTelemetry's variables for what they leave open."""

from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.core.settings import TelemetrySettings
from penstock.observe.otlp.target import Telemetry, telemetry


def found(settings: TelemetrySettings | None = None, /, **environment: str) -> Telemetry:
    return telemetry(settings or TelemetrySettings(), "penstock-gateway", environment)


def test_without_an_endpoint_nothing_is_pushed() -> None:
    assert found().traces is None
    assert found().metrics is None


def test_the_standard_variables_are_enough() -> None:
    both = found(
        OTEL_EXPORTER_OTLP_ENDPOINT="https://collector:4318/base/",
        OTEL_EXPORTER_OTLP_HEADERS="api-key=a%20b,x=1",
        OTEL_EXPORTER_OTLP_TIMEOUT="2500",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_SERVICE_NAME="door",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=prod,service.name=other",
        OTEL_METRIC_EXPORT_INTERVAL="5000",
    )
    assert both.traces is not None
    assert both.metrics is not None
    assert both.traces.url == "https://collector:4318/base/v1/traces"
    assert both.metrics.url == "https://collector:4318/base/v1/metrics"
    assert both.traces.headers == {"api-key": "a b", "x": "1"}
    assert (both.traces.timeout_s, both.traces.is_gzipped, both.metrics_every_s) == (2.5, True, 5.0)
    assert both.resource == {"service.name": "door", "deployment.environment.name": "prod"}


def test_a_kind_of_news_may_have_an_endpoint_of_its_own_that_is_used_as_it_is() -> None:
    both = found(
        OTEL_EXPORTER_OTLP_ENDPOINT="http://one:4318",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://two:9/path",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="a=1",
        OTEL_METRICS_EXPORTER="none",
    )
    assert both.traces is not None
    assert (both.traces.url, both.traces.headers) == ("http://two:9/path", {"a": "1"})
    assert both.metrics is None


@pytest.mark.parametrize(
    ("endpoint", "variable", "protocol"),
    [
        ("http://c:4317", "", "grpc"),
        ("http://c:4318", "", "http/protobuf"),
        ("c:4317", "", "grpc"),
        ("http://c:4318", "grpc", "grpc"),
        ("http://c:4317", "http/protobuf", "http/protobuf"),
    ],
)
def test_the_protocol_is_as_said_or_by_the_port(endpoint: str, variable: str, protocol: str) -> None:
    target = found(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=variable).traces
    assert target is not None
    assert target.protocol == protocol


def test_settings_win_over_the_environment() -> None:
    settings = TelemetrySettings(
        endpoint="http://mine:1", protocol="grpc", service_name="me", metrics=False, sample=0.25, metrics_every_s=7.0
    )
    both = found(
        settings,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://theirs:2",
        OTEL_SERVICE_NAME="they",
        OTEL_TRACES_SAMPLER="always_off",
    )
    assert both.traces is not None
    assert (both.traces.url, both.traces.protocol, both.metrics) == ("http://mine:1", "grpc", None)
    assert (both.resource["service.name"], both.sampling.ratio) == ("me", 0.25)


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio", "follows"),
    [
        ("always_on", "", 1.0, False),
        ("always_off", "", 0.0, False),
        ("parentbased_always_off", "", 0.0, True),
        ("traceidratio", "0.1", 0.1, False),
        ("parentbased_traceidratio", "0.5", 0.5, True),
    ],
)
def test_the_standard_samplers_are_known(sampler: str, argument: str, ratio: float, follows: bool) -> None:
    sampling = found(OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=argument).sampling
    assert (sampling.ratio, sampling.follows_parent) == (ratio, follows)


def test_all_of_it_can_be_switched_off_by_the_standard_variable() -> None:
    off = found(TelemetrySettings(endpoint="http://c:1"), OTEL_SDK_DISABLED="true")
    assert (off.traces, off.metrics) == (None, None)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://c"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:99999"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_says_so(variable: str, value: str) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"} | {variable: value}
    with pytest.raises(ConfigError) as caught:
        found(**environment)
    assert variable in caught.value.message or value in caught.value.message
    assert variable != "OTEL_EXPORTER_OTLP_HEADERS" or value not in caught.value.message


def test_a_share_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG"):
        found(OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="2")
