"""The gRPC port of a replica or a gateway, if it has one: on the host of its HTTP port, with the same certificate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.settings import ServerSettings
from penstock.oip.calls import Calls

if TYPE_CHECKING:
    from penstock.gateway.settings.gateway import GatewaySettings
    from penstock.oip.over_grpc import OverGrpc


def grpc_of_replica(settings: ServerSettings, calls: Calls) -> OverGrpc | None:
    """Raises ConfigError where penstock[grpc] is not installed."""
    if settings.grpc_port is None:
        return None
    leave_forks_alone()
    from penstock.oip.over_grpc import GrpcPort, OverGrpc

    files = (settings.tls_cert, settings.tls_key, settings.client_ca)
    return OverGrpc(calls, GrpcPort(settings.host, settings.grpc_port, *files))


def grpc_of_gateway(settings: GatewaySettings, calls: Calls, *, has_siblings: bool) -> OverGrpc | None:
    """`has_siblings`: other workers of this gateway accept at the same port. Raises ConfigError."""
    port = settings.grpc_port
    if port is None:
        return None
    if has_siblings and not port:
        raise ConfigError("several workers cannot pick one free port: give it a number", param="grpc_port")
    leave_forks_alone()
    from penstock.oip.over_grpc import GrpcPort, OverGrpc

    files = (settings.tls_cert, settings.tls_key, None)
    return OverGrpc(calls, GrpcPort(settings.host, port, *files, shares=has_siblings))


def leave_forks_alone() -> None:
    """Processes that are started here begin anew and have no use for gRPC, which else complains of each."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
