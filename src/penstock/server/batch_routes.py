"""Files and batches are a gateway's: a replica keeps nothing, and says so by name."""

from __future__ import annotations

from penstock.api.asgi import Request, Route
from penstock.api.errors import convention_at
from penstock.api.sink import Sink
from penstock.core.errors import NotFound

_ROOTS = ("/v1/files", "/v1/batches", "/v1/messages/batches")
_METHODS = ("GET", "POST", "DELETE")


def routes() -> list[Route]:
    return [
        Route(method, path, _refuse, convention=convention_at(root.encode()))
        for root in _ROOTS
        for path in (root, f"{root}/{{id}}")
        for method in _METHODS
    ]


async def _refuse(request: Request, _: Sink) -> None:
    raise NotFound(
        f"{request.path}: files and batches are kept by a gateway, and this is a single replica: "
        "start `penstock serve MODEL --replicas 2`, or a `penstock gateway` in front of it"
    )
