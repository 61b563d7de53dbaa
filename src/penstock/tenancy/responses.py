"""Responses that clients may come back to: their input items, and the response as it was, by tenant.

A response is kept for a time, and each tenant has room for so many and so many bytes: beyond that its oldest go. One
that is still being made has an owner, the process that makes it, for as long as that renews its lease; then another may
claim it, with the request that it is made of. One that was lost too often is found to have failed. What a response is
made of is for others to know: here it is JSON text, but for the few members that are asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from penstock.core.errors import InvalidValue
from penstock.tenancy.database import Database, Execute, Row

ACTIVE = ("queued", "in_progress")
_IS_ACTIVE = "status IN ('queued', 'in_progress')"
MAX_TRIES = 3  # processes that may die while they make one
_COLUMNS = "id, previous_id, status, created_at, input, response, is_background, owner_until, is_streamed, can_go_on"
_CAN_GO_ON = f"CASE WHEN request IS NOT NULL AND tries < {MAX_TRIES} THEN 1 ELSE 0 END AS can_go_on"
_SELECTED = _COLUMNS.replace("can_go_on", _CAN_GO_ON)
_OF_EARLIER = ", ".join(  # turns of a conversation are never made anew
    "0" if column == "can_go_on" else f"r.{column}" for column in _COLUMNS.split(", ")
)
_MAX_TURNS = 1000  # of a conversation
_EVICTED = 64  # rows at a time


class ResponseLimits(Struct, frozen=True):
    """Room of each tenant, and how long a response is kept."""

    ttl_s: float
    max_responses: int
    max_bytes: int


class StoredResponse(NamedTuple):
    id: str
    previous_id: str | None
    status: str
    created_at: float
    input: str  # a list of items, as JSON
    response: str  # an object, as JSON
    is_background: bool
    owner_until: float | None  # None: it has ended
    is_streamed: bool  # it is made as a stream, whose events are kept at its end
    can_go_on: bool  # another process can make it

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


class ClaimedResponse(NamedTuple):
    """A response that another process has left, to be made from its beginning."""

    tenant_id: str
    id: str
    key_id: str
    request: str


class ResponseBook:
    """The store's part of it. Blocks: for commands and for threads of their own. Who may see a response is a matter of
    its tenant alone, so there is no method without one but those for owners."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def add(
        self,
        tenant_id: str,
        response_id: str,
        *,
        previous_id: str | None,
        status: str,
        input: str,
        response: str,
        limits: ResponseLimits,
        owner: str | None = None,
        lease_s: float = 0.0,
        is_streamed: bool = False,
        request: str | None = None,
        key_id: str = "",
    ) -> None:
        """`owner`: it is being made in the background, by this process, of `request`. `is_streamed`: as a stream.
        Raises InvalidValue for one that is larger than all the room of a tenant."""
        num_bytes, now_s = sum(len(text.encode()) for text in (input, response, request or "")), self._clock()
        if num_bytes > limits.max_bytes:
            raise InvalidValue(f"a response of {num_bytes} bytes is larger than the room for all of a tenant's")
        until_s = now_s + lease_s if owner is not None else None
        with self._database.writing() as execute:
            execute("DELETE FROM responses WHERE expires_at <= ?", (now_s,))
            _make_room(execute, tenant_id, limits.max_responses - 1, limits.max_bytes - num_bytes)
            execute(
                "INSERT INTO responses (tenant_id, id, previous_id, status, created_at, expires_at, num_bytes, input, "
                "response, is_background, owner, owner_until, is_streamed, request, key_id, tries) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
                (
                    tenant_id,
                    response_id,
                    previous_id,
                    status,
                    now_s,
                    now_s + limits.ttl_s,
                    num_bytes,
                    input,
                    response,
                    int(owner is not None),
                    owner,
                    until_s,
                    int(is_streamed),
                    request,
                    key_id,
                ),
            )

    def find(self, tenant_id: str, response_id: str) -> StoredResponse | None:
        with self._database.reading() as execute:
            rows = execute(
                f"SELECT {_SELECTED} FROM responses WHERE tenant_id = ? AND id = ? AND expires_at > ?",
                (tenant_id, response_id, self._clock()),
            )
        return _stored(rows[0]) if rows else None

    def events(self, tenant_id: str, response_id: str) -> str | None:
        """The events of a response that was streamed, as `end` was given them; None: they are not kept."""
        with self._database.reading() as execute:
            rows = execute(
                "SELECT events FROM responses WHERE tenant_id = ? AND id = ? AND expires_at > ?",
                (tenant_id, response_id, self._clock()),
            )
        return str(rows[0][0]) if rows and rows[0][0] is not None else None

    def is_orphan(self, found: StoredResponse) -> bool:
        """Whether its owner has stopped renewing its lease, and nobody will make it."""
        is_left = found.is_active and found.owner_until is not None and found.owner_until <= self._clock()
        return is_left and not found.can_go_on

    def conversation(self, tenant_id: str, response_id: str) -> list[StoredResponse]:
        """The response and all before it, the first one first. One that is missing leaves those after it alone."""
        now_s = self._clock()
        with self._database.reading() as execute:
            rows = execute(
                f"WITH RECURSIVE turns AS (SELECT {_SELECTED}, 0 AS depth FROM responses "
                "WHERE tenant_id = ? AND id = ? AND expires_at > ? UNION ALL "
                f"SELECT {_OF_EARLIER}, turns.depth + 1 "
                "FROM responses r JOIN turns ON r.id = turns.previous_id "
                "WHERE r.tenant_id = ? AND r.expires_at > ? AND turns.depth < ?) "
                f"SELECT {_COLUMNS} FROM turns ORDER BY depth DESC",
                (tenant_id, response_id, now_s, tenant_id, now_s, _MAX_TURNS),
            )
        return [_stored(row) for row in rows]

    def end(
        self,
        tenant_id: str,
        response_id: str,
        *,
        status: str,
        response: str,
        owner: str | None = None,
        events: str | None = None,
    ) -> bool:
        """The end of one that is active. False: it is not, or is not this owner's; None: whoever's it is. `events`: of
        one that was streamed."""
        is_owners, owners = (" AND owner = ?", (owner,)) if owner is not None else ("", ())
        where = f"tenant_id = ? AND id = ? AND {_IS_ACTIVE}{is_owners}"
        key = (tenant_id, response_id, *owners)
        with self._database.writing() as execute:
            found = execute(f"SELECT input FROM responses WHERE {where}", key)
            num_bytes = len(response.encode()) + (len(str(found[0][0]).encode()) if found else 0) + len(events or "")
            ended = execute(
                "UPDATE responses SET status = ?, response = ?, num_bytes = ?, events = ?, owner = NULL, "
                f"owner_until = NULL, request = NULL WHERE {where} RETURNING id",  # again: another may have ended it
                (status, response, num_bytes, events, *key),
            )
        return bool(ended)

    def delete(self, tenant_id: str, response_id: str) -> bool:
        """False: there is none."""
        with self._database.writing() as execute:
            return bool(
                execute("DELETE FROM responses WHERE tenant_id = ? AND id = ? RETURNING id", (tenant_id, response_id))
            )

    def forget(self, tenant_id: str) -> int:
        """All that a tenant has; how many there were."""
        with self._database.writing() as execute:
            return len(execute("DELETE FROM responses WHERE tenant_id = ? RETURNING id", (tenant_id,)))

    def claim(self, owner: str, lease_s: float, most: int) -> list[ClaimedResponse]:
        """Takes up to `most` responses that other owners have left, the oldest first; now they are this owner's."""
        now_s = self._clock()
        left = (
            f"{_IS_ACTIVE} AND owner IS NOT NULL AND owner_until <= ? AND request IS NOT NULL AND tries < {MAX_TRIES}"
        )
        with self._database.reading() as execute:  # most looks find nothing, and need no lock
            found = execute(
                f"SELECT tenant_id, id FROM responses WHERE {left} AND expires_at > ? ORDER BY created_at LIMIT ?",
                (now_s, now_s, most),
            )
        if not found:
            return []
        with self._database.writing() as execute:
            rows = [
                row
                for tenant_id, response_id in found
                for row in execute(
                    f"UPDATE responses SET owner = ?, owner_until = ?, tries = tries + 1 WHERE {left} "
                    "AND tenant_id = ? AND id = ? RETURNING tenant_id, id, key_id, request",
                    (owner, now_s + lease_s, now_s, tenant_id, response_id),
                )
            ]
        return [ClaimedResponse(*(str(value or "") for value in row)) for row in rows]

    def release(self, owner: str) -> None:
        """The process ends in good order: another may go on at once, and that was no try."""
        with self._database.writing() as execute:
            execute(
                f"UPDATE responses SET owner_until = ?, tries = tries - 1 WHERE owner = ? AND {_IS_ACTIVE}",
                (self._clock(), owner),
            )

    def renew(self, owner: str, lease_s: float) -> set[tuple[str, str]]:
        """Renews the lease of all that this process makes, and returns them, each with its tenant: whichever is not
        among them was cancelled or deleted."""
        with self._database.writing() as execute:
            rows = execute(
                f"UPDATE responses SET owner_until = ? WHERE owner = ? AND {_IS_ACTIVE} RETURNING tenant_id, id",
                (self._clock() + lease_s, owner),
            )
        return {(str(tenant_id), str(response_id)) for tenant_id, response_id in rows}


def _make_room(execute: Execute, tenant_id: str, max_responses: int, max_bytes: int) -> None:
    """Deletes the oldest that have ended, as long as there are more. Those that are being made stay."""
    (row,) = execute("SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM responses WHERE tenant_id = ?", (tenant_id,))
    count, num_bytes = int(row[0]), int(row[1])
    while count > max_responses or num_bytes > max_bytes:
        oldest = execute(
            f"SELECT id, num_bytes FROM responses WHERE tenant_id = ? AND NOT ({_IS_ACTIVE}) "
            "ORDER BY created_at, id LIMIT ?",
            (tenant_id, _EVICTED),
        )
        if not oldest:
            return
        for response_id, size in oldest:
            if count <= max_responses and num_bytes <= max_bytes:
                return
            execute("DELETE FROM responses WHERE tenant_id = ? AND id = ?", (tenant_id, response_id))
            count, num_bytes = count - 1, num_bytes - int(size)


def _stored(row: Row | Sequence[object]) -> StoredResponse:
    response_id, previous_id, status, created_at, input, response, is_background, owner_until, *flags = row
    return StoredResponse(
        str(response_id),
        None if previous_id is None else str(previous_id),
        str(status),
        float(created_at),  # type: ignore[arg-type]
        str(input),
        str(response),
        bool(is_background),
        None if owner_until is None else float(owner_until),  # type: ignore[arg-type]
        *map(bool, flags),
    )
