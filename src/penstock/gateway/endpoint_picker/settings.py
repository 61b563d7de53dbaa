"""Settings of the Endpoint Picker, `endpoint_picker` in the gateway's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from penstock.core.settings import setting
from penstock.core.slo import Seconds

Port = Annotated[int, Meta(ge=0, le=65535)]


@dataclass(frozen=True)
class EndpointPickerSettings:
    host: str = setting("127.0.0.1", "address to listen on; in a pod 0.0.0.0")
    port: Port = setting(9002, "port of the ext_proc service; 0 picks a free one")
    health_port: Port | None = setting(9003, "port of the gRPC health service without TLS, for probes; none: no port")
    metrics_port: Port = setting(9090, "port of /metrics and the admin API where admin_port is not set")
    secure: bool = setting(True, "TLS: with tls_cert, else with a certificate that signs itself, as Envoy expects it")
    tls_cert: str | None = setting(None, "PEM file of the certificate; a new one is used from the next connection on")
    tls_key: str | None = setting(None, "PEM file of its private key; auto: in the certificate's file")
    max_fallbacks: Annotated[int, Meta(ge=0, le=16)] = setting(
        2, "replicas named behind the picked one, in the order in which Envoy tries them"
    )
    max_body_bytes: Annotated[int, Meta(ge=1 << 10)] = setting(8 << 20, "the largest body of a request")
    drain_s: Seconds = setting(300.0, "how long streams that are open may last after the process was told to stop")
    objectives: dict[str, Literal["interactive", "standard", "batch"]] = setting(
        {}, "the class of requests by their x-gateway-inference-objective; a class's own name needs no entry"
    )
