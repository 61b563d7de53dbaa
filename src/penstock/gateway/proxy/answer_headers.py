"""Headers of an answer that the gateway adds: the request's id, its replica, and why that was picked."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.replicas.replica import Replica
from penstock.router.explanation import replica_header, route_header
from penstock.router.router import Choice
from penstock.tenancy.tenants import Tenant


def id_header(request_id: str) -> bytes:
    return b"x-request-id: %b\r\n" % request_id.encode()


class AnswerHeaders:
    def __init__(self, replicas: Mapping[str, Replica], *, explains: bool) -> None:
        """`explains`: answers say which replica they come from, and why it was picked."""
        self._replicas = replicas
        self._explains = explains

    def of(self, request_id: str, choice: Choice | None, tenant: Tenant) -> bytes:
        """Why a replica was picked tells how busy the others are: that is for tenants that may know."""
        if choice is None or not self._explains:
            return b"x-request-id: %b\r\n" % request_id.encode()
        lines = f"x-request-id: {request_id}\r\nx-penstock-replica: {replica_header(choice, self._called)}\r\n"
        if tenant.route_headers:
            lines += f"x-penstock-route: {route_header(choice, self._called)}\r\n"
        return lines.encode()

    def _called(self, replica_id: str) -> str:
        replica = self._replicas.get(replica_id)
        return replica.name if replica is not None else "removed"
