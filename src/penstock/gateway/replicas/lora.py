"""Sees to it that replicas have the adapters that are configured for them, also after they have started again, and no
longer those that were.

A penstock replica says what it has. Of others it is known by what they answered: vLLM and SGLang are asked to load what
they are to have each time they come up; whoever takes an adapter's path with every request needs nothing. What a
replica cannot get is tried again, ever more rarely; meanwhile the router passes it over. What it got is noted: when a
configuration no longer names it, that is taken away again, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.core.errors import StoreUnavailable
from penstock.core.replica import ReplicaState
from penstock.dialects.liveness import Answer
from penstock.gateway.replicas.dialect_upstream import DialectUpstream
from penstock.gateway.replicas.fetch import fetch
from penstock.gateway.replicas.replica import Replica
from penstock.http.call import Failure
from penstock.observe.redaction import redact

_LOAD_TIMEOUT_S = 120.0  # a large adapter comes from a slow disk
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
_OWN_PATH = b"/v1/load_lora_adapter"
_OWN_UNLOAD_PATH = b"/v1/unload_lora_adapter"
_IS_THERE = b"already"  # in what vLLM and SGLang say of one that they have
_IS_GONE = b"does not exist"  # and SGLang of one that it does not have; others have a status for it

log = logging.getLogger(__name__)


class AdapterNotes(Protocol):
    """Notes of which adapter was brought to which replica, for gateways to come. Blocks."""

    def bring(self, replica: str, name: str) -> bool:
        """It is about to be brought there. False: it was before."""

    def forget(self, replica: str, name: str) -> None:
        """It is no longer there, or was not brought after all."""


class ForgetfulNotes:
    """Notes of a gateway that has nowhere to write."""

    def bring(self, replica: str, name: str) -> bool:
        return True

    def forget(self, replica: str, name: str) -> None:
        pass


class AdapterKeeper:
    """Keeper of one replica's adapters. `look` is called whenever something is heard of it, and returns at once."""

    def __init__(self, replica: Replica, changed: Callable[[Replica], None], notes: AdapterNotes) -> None:
        self._replica = replica
        self._changed = changed
        self._notes = notes
        self._task: asyncio.Task[None] | None = None
        self._pauses_s: dict[str, float] = {}  # of those that failed
        self._again_at: dict[str, float] = {}

    def look(self) -> None:
        replica = self._replica
        if replica.snapshot.state is ReplicaState.OUT:
            if not replica.relays:
                replica.loaded = frozenset()  # when it comes back it may be another process
            return
        if self._task is None and (self._missing() or self._excess()):
            self._task = asyncio.get_running_loop().create_task(self._work())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _missing(self) -> list[str]:
        replica = self._replica
        has = replica.snapshot.adapters if replica.relays else replica.loaded
        return [name for name in replica.adapters if name not in has and self._is_due(name)]

    def _excess(self) -> list[str]:
        return [name for name in self._replica.unwanted if self._is_due(name)]

    def _is_due(self, name: str) -> bool:
        return self._replica.upstream.clock.now() >= self._again_at.get(name, 0.0)

    async def _work(self) -> None:
        try:
            for name in self._excess():
                await self._unload(name)
            for name in self._missing():
                await self._load(name, self._replica.adapters[name])
        finally:
            self._task = None

    async def _unload(self, name: str) -> None:
        """Returns when no request runs with it any longer."""
        replica = self._replica
        dialect = replica.upstream.dialect if isinstance(replica.upstream, DialectUpstream) else None
        way = _OWN_UNLOAD_PATH if replica.relays else dialect.lora.unload if dialect and dialect.lora else None
        why = f"a server that speaks {replica.kind} cannot be asked to unload adapters"
        if way is not None:
            body = msgspec.json.encode({"lora_name": name})
            answer = await fetch(replica.upstream, way, replica.headers, timeout_s=_LOAD_TIMEOUT_S, body=body)
            why = _failure(answer, _IS_GONE, 200, 404)
        if why:
            self._put_off(name)
            log.warning("%s keeps adapter %s, which is no longer configured: %s", redact(replica.id), name, why)
            return
        replica.unwanted.discard(name)
        await self._note(self._notes.forget, name)
        log.info("%s no longer has adapter %s, which is no longer configured", redact(replica.id), name)

    async def _load(self, name: str, path: str | None) -> None:
        replica = self._replica
        way, why = self._way(path)
        if way is not None:
            body = msgspec.json.encode({"lora_name": name, "lora_path": path})
            is_new = await self._note(self._notes.bring, name)  # first: this process may end at any time
            # Not through the replica's own way of sending: that is for requests, and translates them.
            answer = await fetch(replica.upstream, way, replica.headers, timeout_s=_LOAD_TIMEOUT_S, body=body)
            why = _failure(answer, _IS_THERE, 200)
            if is_new and (isinstance(answer, Failure) or answer.status != 200):
                await self._note(self._notes.forget, name)  # it could not, or somebody else has brought it
        self._done(name, why)

    def _way(self, path: str | None) -> tuple[bytes | None, str]:
        """Where it is asked to load one, or else why it cannot be; empty: nothing has to be done."""
        replica = self._replica
        if replica.relays:
            return (_OWN_PATH, "") if path else (None, "it does not have it, and no path is configured")
        dialect = replica.upstream.dialect if isinstance(replica.upstream, DialectUpstream) else None
        if path is None:
            return None, ""  # the operator says that it has it
        lora = dialect.lora if dialect is not None else None
        if lora is None or (lora.load is None and lora.select != "lora_request") or lora.select is None:
            return None, f"a server that speaks {replica.kind} cannot be asked to load adapters"
        return lora.load, ""

    def _done(self, name: str, why: str) -> None:
        replica = self._replica
        if why:
            pause_s = self._put_off(name)
            log.warning("%s does not get adapter %s, tried again in %.0f s: %s", redact(replica.id), name, pause_s, why)
            return
        self._pauses_s.pop(name, None)
        # A penstock replica will say so itself in a moment; until then nobody asks again.
        self._again_at[name] = self._replica.upstream.clock.now() + _FIRST_PAUSE_S if replica.relays else 0.0
        log.info("%s has adapter %s", redact(replica.id), name)
        if not replica.relays:
            replica.loaded |= {name}
            self._changed(replica)

    async def _note(self, change: Callable[[str, str], bool | None], name: str) -> bool | None:
        """Writes a change down; None: it could not be. The replica has what it has all the same."""
        try:
            return await asyncio.to_thread(change, redact(self._replica.id), name)
        except StoreUnavailable as error:
            log.warning("it is not noted who brought adapter %s: %s", name, error.message)
            return None

    def _put_off(self, name: str) -> float:
        """How long."""
        pause_s = self._pauses_s[name] = min(2 * self._pauses_s.get(name, _FIRST_PAUSE_S / 2), _MAX_PAUSE_S)
        self._again_at[name] = self._replica.upstream.clock.now() + pause_s
        return pause_s


def _failure(answer: Answer | Failure, is_as_wanted: bytes, *statuses: int) -> str:
    """Empty: it is as it was to be."""
    if isinstance(answer, Failure):
        return answer[1]
    if answer.status in statuses or is_as_wanted in answer.body:
        return ""
    return f"{answer.status}: {answer.body[:300].decode(errors='replace')}"
