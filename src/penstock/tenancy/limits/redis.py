"""One limiter for gateways on many hosts, in Redis or Valkey: each reserve and each settle is one atomic script there.

The script (account.lua) keeps the same books as `account`, on the server's clock. Whatever gathers while a round trip
is under way goes out together in the next. Every process has a lease that it renews; what a dead one held comes back
when its lease has run out. A Redis that was restarted is trusted with nothing it says it knew: every process tells it
what it was granted in the last minute, and for `RECOVER_S`, until all that live have done so, nothing is granted.

When Redis is out of reach, `on_loss` decides: "closed" refuses, "open" falls back to limits of this process alone. It
is tried again with growing pauses; then what is open is registered again and what ended meanwhile is settled. An error
that the script replies with is no such loss as long as a heartbeat by the same script succeeds: it is the business of
the tenant whose account it is about, which is refused, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import Callable
from importlib.resources import files
from itertools import chain
from typing import Literal

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from penstock.observe.background import Worker, count_error, outliving
from penstock.tenancy.limits.limiter import Answer, Held, LocalLimiter
from penstock.tenancy.limits.quota import MINUTE, REQUESTS, TOKENS, US, Quota, Reason, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation
from penstock.tenancy.limits.window import Slot

Reply = list[int | bytes] | ResponseError

_NAME = "limiter"
LEASE_S = 8.0
BEAT_S = 2.0
TIMEOUT_S = 1.0
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
RECOVER_S = 3.0  # longer than the pause between two tries: then every process that lives has been back

log = logging.getLogger(__name__)

SCRIPT = (files("penstock.tenancy.limits") / "account.lua").read_text()


KEYS = ("account:{}", "open:{}", "holders", "since")  # in the order of the script


def common_prefix(name: str) -> str:
    """One hash slot, so that the script may use its keys together; another number where accounts look different."""
    return f"{{{name}}}:limits-2"


def keys(prefix: str, tenant: str) -> list[str]:
    return [f"{prefix}:{key.format(tenant)}" for key in KEYS]


def limits(quota: Quota) -> tuple[int, ...]:
    """A quota as the script reads it; zero is no limit."""
    requests, tokens = quota.requests, quota.tokens
    return (
        0 if requests is None else requests.per_minute,
        0 if tokens is None else tokens.per_minute,
        int(requests is not None and requests.smooth),
        int(tokens is not None and tokens.smooth),
        quota.concurrency or 0,
    )


class Granted:
    """Grants of this process, by tenant and slot: a Redis that lost its memory is told."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[int, Slot]] = {}
        self._newest = 0

    def add(self, tenant: str, start: int, newest: int, tokens: int) -> None:
        self._newest = max(self._newest, newest)
        slot = self._slots.setdefault(tenant, {}).setdefault(start, Slot(start, newest))
        slot.newest = max(slot.newest, newest)
        slot.amounts[REQUESTS] += 1
        slot.amounts[TOKENS] += tokens

    def settle(self, tenant: str, start: int, requests: int, unused: int) -> None:
        slot = self._slots.get(tenant, {}).get(start)
        if slot is not None:
            slot.amounts[REQUESTS] += requests - 1
            slot.amounts[TOKENS] -= unused

    def forget_old(self) -> None:
        since = self._newest - MINUTE
        kept = {
            tenant: {start: slot for start, slot in slots.items() if slot.newest > since}
            for tenant, slots in self._slots.items()
        }
        self._slots = {tenant: slots for tenant, slots in kept.items() if slots}

    def calls(self, now: int) -> list[_Call]:
        return [
            _Call(
                tenant, ("recall", now, *chain.from_iterable((s.start, s.newest, *s.amounts) for s in slots.values()))
            )
            for tenant, slots in self._slots.items()
        ]


class SharedReservation:
    """A reservation from the account in Redis."""

    __slots__ = ("id", "quota", "start", "tenant", "tokens", "used")

    def __init__(self, id: str, tenant: str, quota: Quota, tokens: int) -> None:
        self.id = id
        self.tenant = tenant
        self.quota = quota
        self.tokens = tokens
        self.used = 0
        self.start = 0  # of the slot that it was admitted in


class _Call:
    """One run of the script: a reservation that somebody waits for, or a message that nobody does."""

    __slots__ = ("answer", "arguments", "held", "tenant")

    def __init__(
        self,
        tenant: str,
        arguments: tuple[str | int, ...],
        held: SharedReservation | None = None,
        answer: asyncio.Future[Answer] | None = None,
    ) -> None:
        self.tenant = tenant
        self.arguments = arguments
        self.held = held
        self.answer = answer


class RedisLimiter:
    """A `Limiter`. `start` it before use and `close` it."""

    def __init__(
        self,
        url: str,
        *,
        on_loss: Literal["open", "closed"],
        prefix: str = "penstock",
        retry_quantum_s: float = 1.0,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: the time that accounts and leases go by, in seconds; without one the server's, which all share."""
        self._redis: Redis = Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_loss = on_loss
        self._prefix = common_prefix(prefix)
        self._quantum = round(retry_quantum_s * US)
        self._alone = LocalLimiter(retry_quantum_s=retry_quantum_s)
        self._name = secrets.token_hex(8)
        self._ids = itertools.count(1)
        self._open: dict[str, SharedReservation] = {}
        self._granted = Granted()
        self._calls: list[_Call] = []
        self._wake = asyncio.Event()
        self._script = ""
        self.is_connected = False
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[Worker] = []

    async def start(self) -> None:
        """Returns at once if Redis answers, and without it too: then `on_loss` applies until it does."""
        await self._connect()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._beat())]
        self._workers = [Worker.of_task(_NAME, task) for task in self._tasks]

    async def close(self) -> None:
        """Stops the limiter. Requests that ended are still told, if Redis answers."""
        for worker in self._workers:
            worker.stop()
        self._is_closing = True
        self._wake.set()
        work, beat = self._tasks
        beat.cancel()
        await asyncio.wait([work], timeout=self._timeout_s)
        work.cancel()
        await asyncio.gather(work, beat, return_exceptions=True)
        self._lose(self._calls)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(
                self._timeout_s
            ):  # a connection that was cut off in mid-call may never say goodbye
                await self._redis.aclose()

    def reserve(self, tenant: str, quota: Quota, tokens: int, *, caller: int = 0) -> Answer | asyncio.Future[Answer]:
        held = SharedReservation(f"{self._name}.{next(self._ids)}", tenant, quota, tokens)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = self._about("reserve", held, tokens, caller)
        call = _Call(tenant, asked, held, answer)
        if not self.is_connected:
            return self._without_redis(call)
        self._call(call)
        return answer

    def progress(self, held: Held, used: int) -> None:
        if isinstance(held, Reservation):
            return self._alone.progress(held, used)
        assert isinstance(held, SharedReservation)
        held.used = used
        self._call(_Call(held.tenant, ("progress", self._now(), held.id, used)))

    def settle(self, held: Held, used: int) -> None:
        if isinstance(held, Reservation):
            return self._alone.settle(held, used)
        assert isinstance(held, SharedReservation)
        if self._open.pop(held.id, None) is not None:
            self._granted.settle(held.tenant, held.start, 1, held.tokens - used)
            self._call(_Call(held.tenant, ("settle", self._now(), held.id, used)))

    def release(self, held: Held) -> None:
        if isinstance(held, Reservation):
            return self._alone.release(held)
        assert isinstance(held, SharedReservation)
        if self._open.pop(held.id, None) is not None:
            self._granted.settle(held.tenant, held.start, 0, held.tokens)
            self._call(_Call(held.tenant, ("release", self._now(), held.id)))

    def _about(self, operation: str, held: SharedReservation, *more: int) -> tuple[str | int, ...]:
        return (operation, self._now(), held.id, self._name, *limits(held.quota), self._quantum, *more)

    def _now(self) -> int:
        """The time argument of the script: microseconds, or zero for the server's own clock."""
        return 0 if self._clock is None else round(self._clock() * US)

    def _call(self, call: _Call) -> None:
        self._calls.append(call)
        self._wake.set()

    async def _work(self) -> None:
        """One batch after the other; what cannot be delivered waits here until Redis is back."""
        pauses = itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))
        while not self._is_closing or (self._calls and self.is_connected):
            if not self.is_connected:
                await asyncio.sleep(next(pauses) * random.uniform(0.8, 1.2))
                await self._connect()
                continue
            pauses = itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))
            await self._wake.wait()
            self._wake.clear()
            batch, self._calls = self._calls, []
            try:
                results = await self._run(batch)
                if any(isinstance(result, ResponseError) for result in results):
                    await self._check_server()
            except Exception as error:  # the outermost loop; uvloop has its own errors for a lost connection
                log.warning("the limiter lost Redis: %s", error)
                self._lose(batch)
            else:
                for call, result in zip(batch, results, strict=True):
                    with outliving(_NAME):
                        self._deliver(call, result)

    async def _run(self, batch: list[_Call]) -> list[Reply]:
        """One reply for each call. Raises if the connection is lost."""
        pipe = self._redis.pipeline(transaction=False)
        for call in batch:
            pipe.evalsha(self._script, len(KEYS), *keys(self._prefix, call.tenant), *call.arguments)
        results: list[Reply] = await pipe.execute(raise_on_error=False)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ResponseError):
                raise result
        return results

    async def _check_server(self) -> bool:
        """Whether it knows this process. Raises what the server says to everybody: that it has no script, takes no
        writes, has no memory left, …"""
        (result,) = await self._run([self._heartbeat()])
        if isinstance(result, ResponseError):
            raise result
        return bool(result[0])

    async def _connect(self) -> None:
        """Loads the script and says what is open, and what was granted where that is not known."""
        try:
            self._script = await self._redis.script_load(SCRIPT)
            calls = self._restores(is_known=True) if await self._check_server() else self._memory()
            for call, result in zip(calls, await self._run(calls), strict=True):
                if isinstance(result, ResponseError):
                    self._count_error(call, result)
        except Exception as error:
            log.debug("no Redis for the limiter: %s", error)
            return
        self.is_connected = True
        self._wake.set()

    def _restores(self, *, is_known: bool) -> list[_Call]:
        """Restores of what is open. If `is_known`, a lease's end may have settled it: nothing unused comes back."""
        return [
            _Call(held.tenant, self._about("restore", held, held.tokens, held.used, 0 if is_known else held.start))
            for held in self._open.values()
        ]

    def _memory(self) -> list[_Call]:
        return self._granted.calls(self._now()) + self._restores(is_known=False)

    def _heartbeat(self) -> _Call:
        wait = round(RECOVER_S * US) if self._on_loss == "closed" else 0
        return _Call("", ("beat", self._now(), self._name, round(LEASE_S * US), wait))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._granted.forget_old()
            if self.is_connected:
                self._call(self._heartbeat())

    def _count_error(self, call: _Call, error: ResponseError) -> None:
        log.warning("the limiter cannot %s for tenant %s: %.300s", call.arguments[0], call.tenant, error)
        count_error(_NAME, error)

    def _deliver(self, call: _Call, result: Reply) -> None:
        if isinstance(result, ResponseError):
            self._count_error(call, result)
            if call.answer is not None and not call.answer.done():
                call.answer.set_result(Refusal(Reason.ACCOUNT_ERROR, 1.0))
            return
        if call.arguments[0] == "beat" and not result[0]:  # it was emptied
            for forgotten in self._memory():
                self._call(forgotten)
        if call.answer is None or call.held is None:
            return
        if result[0] == 0:
            if not call.answer.done():
                call.answer.set_result(_refusal(result))
            return
        self._open[call.held.id] = call.held
        call.held.start = int(result[1])
        self._granted.add(call.tenant, call.held.start, int(result[2]), call.held.tokens)
        if call.answer.done():
            self.release(call.held)  # cancelled: nobody else will
        else:
            call.answer.set_result(call.held)

    def _lose(self, batch: list[_Call]) -> None:
        """Answers the waiting calls without Redis. What ended is told once Redis is back; ending twice does nothing."""
        self.is_connected = False
        waiting, self._calls = [*batch, *self._calls], []
        for call in waiting:
            if call.answer is None:
                if call.arguments[0] in ("settle", "release"):
                    self._calls.append(call)
                continue
            self._calls.append(
                _Call(call.tenant, ("release", self._now(), call.arguments[2]))
            )  # it may have been granted
            if not call.answer.done():
                call.answer.set_result(self._without_redis(call))

    def _without_redis(self, call: _Call) -> Answer:
        held = call.held
        assert held is not None
        if self._on_loss == "closed":
            return Refusal(Reason.UNAVAILABLE, 1.0)
        caller = int(call.arguments[-1])
        return self._alone.reserve(held.tenant, held.quota, held.tokens, caller=caller)


def _refusal(reply: list[int | bytes]) -> Refusal:
    _, reason, wait, is_due, limit, used, kept, is_paced = reply
    assert isinstance(reason, bytes)
    wait_s = int(wait) / US if wait else None
    return Refusal(Reason(reason.decode()), wait_s, bool(is_due), int(limit), int(used), int(kept), bool(is_paced))
