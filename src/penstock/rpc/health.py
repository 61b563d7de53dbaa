"""grpc.health.v1: health checks over gRPC, asked once (`Check`) or followed (`Watch`)."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from penstock.rpc.messages import Message, ProtoFile

_WATCH_S = 1.0  # how often a watched state is looked at


class Serving(enum.IntEnum):
    """The states of grpc.health.v1."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3  # a watch is told so; a check is answered NOT_FOUND


Status = Callable[[str], Awaitable[Serving | None]]  # by the service's name; None: there is no such service

FILE = ProtoFile(
    "grpc/health/v1/health.proto",
    "grpc.health.v1",
    {
        "HealthCheckRequest": {"service": (1, "string")},
        "HealthCheckResponse": {"status": (1, "HealthCheckResponse.ServingStatus")},
    },
    enums={"HealthCheckResponse.ServingStatus": [one.name for one in Serving]},
    services={
        "Health": {
            "Check": ("HealthCheckRequest", "HealthCheckResponse"),
            "Watch": ("HealthCheckRequest", "*HealthCheckResponse"),
        }
    },
)
_Request, _Response = FILE["HealthCheckRequest"], FILE["HealthCheckResponse"]


def health_service(status: Status, stopping: asyncio.Event) -> Any:
    """The service's handlers. A watch ends when the server is `stopping`, once it has been told."""

    async def check(request: Message, context: Any) -> Message:
        found = await status(request.service)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Response(status=found)

    async def watch(request: Message, context: Any) -> AsyncIterator[Message]:
        told = None
        while True:
            is_last = stopping.is_set()
            found = await status(request.service)
            found = Serving.SERVICE_UNKNOWN if found is None else found
            if found != told:
                told = found
                yield _Response(status=found)
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), _WATCH_S)

    read, write = _Request.FromString, _Response.SerializeToString
    return grpc.method_handlers_generic_handler(
        FILE.services[0],
        {
            "Check": grpc.unary_unary_rpc_method_handler(check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(watch, read, write),
        },
    )
