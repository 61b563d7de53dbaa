"""Sees to it that replicas have the adapters that are configured for them, also after they have started again.

A penstock replica says what it has. Of others it is known by what they answered: vLLM and SGLang are asked to load what
they are to have each time they come up; whoever takes an adapter's path with every request needs nothing. What a
replica cannot get is tried again, ever more rarely; meanwhile the router passes it over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from penstock.core.replica import ReplicaState
from penstock.gateway.fetch import fetch
from penstock.gateway.http.call import Failure
from penstock.gateway.replicas import Replica
from penstock.gateway.translated import ForeignUpstream
from penstock.observe.redaction import redact

_LOAD_TIMEOUT_S = 120.0  # a large adapter comes from a slow disk
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_OWN_PATH = b"/v1/load_lora_adapter"
_IS_THERE = b"already"  # in what vLLM and SGLang say of one that they have

log = logging.getLogger(__name__)


class AdapterKeeper:
    """Of one replica. `look` is called whenever something is heard of it, and returns at once."""

    def __init__(self, replica: Replica, changed: Callable[[Replica], None]) -> None:
        self._replica = replica
        self._changed = changed
        self._task: asyncio.Task[None] | None = None
        self._pauses_s: dict[str, float] = {}  # of those that failed
        self._again_at: dict[str, float] = {}

    def look(self) -> None:
        replica = self._replica
        if replica.snapshot.state is ReplicaState.OUT:
            if not replica.relays:
                replica.loaded = frozenset()  # when it comes back it may be another process
            return
        if self._task is None and self._missing():
            self._task = asyncio.get_running_loop().create_task(self._load_all())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _missing(self) -> list[str]:
        replica, now = self._replica, asyncio.get_running_loop().time()
        has = replica.snapshot.adapters if replica.relays else replica.loaded
        due = self._again_at
        return [name for name in replica.adapters if name not in has and now >= due.get(name, 0.0)]

    async def _load_all(self) -> None:
        try:
            for name in self._missing():
                await self._load(name, self._replica.adapters[name])
        finally:
            self._task = None

    async def _load(self, name: str, path: str | None) -> None:
        replica = self._replica
        way, why = self._way(path)
        if way is not None:
            body = msgspec.json.encode({"lora_name": name, "lora_path": path})
            # Not through the replica's own way of sending: that is for requests, and translates them.
            answer = await fetch(replica.upstream, way, replica.headers, timeout_s=_LOAD_TIMEOUT_S, body=body)
            if isinstance(answer, Failure):
                why = answer[1]
            elif answer.status == 200 or _IS_THERE in answer.body:
                why = ""
            else:
                why = f"{answer.status}: {answer.body[:300].decode(errors='replace')}"
        self._done(name, why)

    def _way(self, path: str | None) -> tuple[bytes | None, str]:
        """Where it is asked to load one, or else why it cannot be; empty: nothing has to be done."""
        replica = self._replica
        if replica.relays:
            return (_OWN_PATH, "") if path else (None, "it does not have it, and no path is configured")
        dialect = replica.upstream.dialect if isinstance(replica.upstream, ForeignUpstream) else None
        if path is None:
            return None, ""  # the operator says that it has it
        lora = dialect.lora if dialect is not None else None
        if lora is None or (lora.load is None and lora.select != "lora_request") or lora.select is None:
            return None, f"a server that speaks {replica.kind} cannot be asked to load adapters"
        return lora.load, ""

    def _done(self, name: str, why: str) -> None:
        replica = self._replica
        if why:
            pause_s = self._pauses_s[name] = min(2 * self._pauses_s.get(name, _FIRST_PAUSE_S / 2), _MOST_PAUSE_S)
            self._again_at[name] = asyncio.get_running_loop().time() + pause_s
            log.warning("%s does not get adapter %s, tried again in %.0f s: %s", redact(replica.id), name, pause_s, why)
            return
        self._pauses_s.pop(name, None)
        # A penstock replica will say so itself in a moment; until then nobody asks again.
        self._again_at[name] = asyncio.get_running_loop().time() + _FIRST_PAUSE_S if replica.relays else 0.0
        log.info("%s has adapter %s", redact(replica.id), name)
        if not replica.relays:
            replica.loaded |= {name}
            self._changed(replica)
