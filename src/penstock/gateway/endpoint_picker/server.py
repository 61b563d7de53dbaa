"""The gRPC server of an Endpoint Picker: ext_proc and health checks, with TLS, and health checks alone without it."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.replica import ReplicaState
from penstock.gateway.endpoint_picker.picker import EndpointPicker
from penstock.gateway.endpoint_picker.settings import EndpointPickerSettings
from penstock.observe import background

try:
    import grpc

    from penstock.gateway.endpoint_picker import ext_proc_messages as pb
    from penstock.gateway.endpoint_picker.ext_proc import process
    from penstock.rpc.health import Serving, health_service
    from penstock.rpc.listening import Credentials, bind, credentials_of
except ImportError as error:
    raise ConfigError(f"an Endpoint Picker needs the extra penstock[epp]: {error}") from None

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"
_ENVELOPE_BYTES = 1 << 20  # of a message, besides its body
_SELF_SIGNED = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class EndpointPickerServer:
    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._stopping = asyncio.Event()
        self._servers: list[Any] = []
        self.port = self.health_port = 0

    async def listen(self) -> str:
        """Returns where, in words."""
        settings = self._picker.picking
        size = settings.max_body_bytes + _ENVELOPE_BYTES
        options = [("grpc.max_receive_message_length", size), ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((self._ext_proc(), health_service(self.status, self._stopping)))
        credentials = _credentials(settings) if settings.secure else None
        self.port = bind(server, settings.host, settings.port, "endpoint_picker.port", credentials)
        self._servers = [server]
        if settings.health_port is not None:
            health = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            health.add_generic_rpc_handlers((health_service(self.status, self._stopping),))
            self.health_port = bind(health, settings.host, settings.health_port, "endpoint_picker.health_port", None)
            self._servers.append(health)
        for one in self._servers:
            await one.start()
        how = "without TLS" if credentials is None else "with TLS"
        health = f"at {settings.host}:{self.health_port}" if self.health_port else "at the same port"
        return f"penstock endpoint picker at {settings.host}:{self.port}, {how}; health checks {health}"

    async def stop(self, grace_s: float | None = None) -> None:
        """Envoy opens no more streams; those that are open may go on for so long, or as the settings say."""
        self._stopping.set()
        grace_s = self._picker.picking.drain_s if grace_s is None else grace_s
        for server in self._servers:
            await server.stop(grace_s)
            grace_s = 0.0

    # -- ext_proc

    def _ext_proc(self) -> Any:
        async def handle(messages: AsyncIterator[Any], context: Any) -> None:
            await process(self._picker, messages, context.write)

        method = grpc.stream_stream_rpc_method_handler(
            handle, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(EXT_PROC, {"Process": method})

    # -- health

    async def status(self, service: str) -> Serving | None:
        match service:
            case "liveness":
                return Serving.SERVING
            case "" | "readiness" | "envoy.service.ext_proc.v3.ExternalProcessor":
                return Serving.SERVING if self._is_ready() else Serving.NOT_SERVING
            case _:
                return None

    def _is_ready(self) -> bool:
        """A replica is ready, or requests may wait until a controller has started one."""
        picker, now = self._picker, self._picker.now()
        if self._stopping.is_set() or background.dead():
            return False
        replicas = picker.replicas.values()
        return picker.admission.can_hold(now) or any(
            replica.snapshot.state_at(now) is ReplicaState.READY for replica in replicas
        )


def _credentials(settings: EndpointPickerSettings) -> Credentials:
    if settings.tls_cert is not None:
        return credentials_of(settings.tls_cert, settings.tls_key, None, "endpoint_picker.tls_cert")
    return grpc.ssl_server_credentials([_self_signed()])


def _self_signed() -> tuple[bytes, bytes]:
    """Key and certificate by the `openssl` program: gateways do not verify that of an Endpoint Picker."""
    with tempfile.TemporaryDirectory() as directory:
        key, cert = Path(directory) / "key.pem", Path(directory) / "cert.pem"
        files = ["-keyout", str(key), "-out", str(cert), "-days", "3650", "-subj", "/CN=penstock-epp"]
        try:
            subprocess.run([*_SELF_SIGNED, *files], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = f"a certificate that signs itself needs the openssl program ({error}): set tls_cert"
            raise ConfigError(message, param="endpoint_picker.tls_cert") from None
        return key.read_bytes(), cert.read_bytes()
