"""One limiter for gateways on many hosts, in Redis or Valkey: each reserve and each settle is one atomic script there.

The script (account.lua) keeps the same books as `account`, on the server's clock. Whatever gathers while a round trip
is under way goes out together in the next. Every process has a lease that it renews; what a dead one held comes back
when its lease has run out. A Redis that was restarted is trusted with nothing it says it knew: its buckets start
empty, so the bound holds across restarts (the proof is in `shared`).

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
from typing import Literal

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from penstock.observe.background import Worker, count_error, outliving
from penstock.tenancy.limits.account import Reservation, grace_of
from penstock.tenancy.limits.limiter import Answer, Held, LocalLimiter
from penstock.tenancy.limits.quota import US, Quota, Reason, Refusal

Reply = list[int | bytes] | ResponseError

_NAME = "limiter"
LEASE_S = 8.0
BEAT_S = 2.0
TIMEOUT_S = 1.0
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)

log = logging.getLogger(__name__)

SCRIPT = (files("penstock.tenancy.limits") / "account.lua").read_text()


KEYS = ("account:{}", "open:{}", "places:{}", "callers:{}", "holders", "since")  # in the order of the script


def keys(prefix: str, tenant: str) -> list[str]:
    return [f"{prefix}:{key.format(tenant)}" for key in KEYS]


def limits(quota: Quota) -> tuple[int, ...]:
    """A quota as the script reads it; zero is no limit."""
    requests, tokens = quota.requests, quota.tokens
    return (
        *((0, 0) if requests is None else (requests.per_minute, requests.capacity)),
        *((0, 0) if tokens is None else (tokens.per_minute, tokens.capacity)),
        quota.concurrency or 0,
        0 if tokens is None else tokens.largest,
        grace_of(quota),
    )


class SharedReservation:
    """Held from the account in Redis."""

    __slots__ = ("id", "quota", "tenant", "tokens", "used")

    def __init__(self, id: str, tenant: str, quota: Quota, tokens: int) -> None:
        self.id = id
        self.tenant = tenant
        self.quota = quota
        self.tokens = tokens
        self.used = 0


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
        self._prefix = f"{{{prefix}}}:limits"  # one hash slot, so that the script may use its keys together
        self._quantum = round(retry_quantum_s * US)
        self._alone = LocalLimiter(retry_quantum_s=retry_quantum_s)
        self._name = secrets.token_hex(8)
        self._ids = itertools.count(1)
        self._open: dict[str, SharedReservation] = {}
        self._calls: list[_Call] = []
        self._wake = asyncio.Event()
        self._script = ""
        self._run_id = ""  # another one after a restart
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
        """What ended is still told, if Redis answers."""
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
            self._call(_Call(held.tenant, ("settle", self._now(), held.id, used)))

    def release(self, held: Held) -> None:
        if isinstance(held, Reservation):
            return self._alone.release(held)
        assert isinstance(held, SharedReservation)
        if self._open.pop(held.id, None) is not None:
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

    async def _check_server(self) -> None:
        """Raises what the server says to everybody: that it has no script, takes no writes, has no memory left, …"""
        (result,) = await self._run([self._heartbeat()])
        if isinstance(result, ResponseError):
            raise result

    async def _connect(self) -> None:
        """Loads the script and says what is open: a Redis that lost its data learns it, another knows it already."""
        restores = [
            _Call(held.tenant, self._about("restore", held, held.tokens, held.used)) for held in self._open.values()
        ]
        try:
            self._script = await self._redis.script_load(SCRIPT)
            self._run_id = (await self._redis.info("server"))["run_id"]
            await self._check_server()
            for held, result in zip(restores, await self._run(restores), strict=True):
                if isinstance(result, ResponseError):
                    self._count_error(held, result)
        except Exception as error:
            log.debug("no Redis for the limiter: %s", error)
            return
        self.is_connected = True
        self._wake.set()

    def _heartbeat(self) -> _Call:
        return _Call("", ("beat", self._now(), self._name, round(LEASE_S * US), self._run_id))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
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
        if call.answer is None or call.held is None:
            return
        if result[0] == 0:
            _, reason, wait, is_due = result
            assert isinstance(reason, bytes)
            refusal = Refusal(Reason(reason.decode()), int(wait) / US if wait else None, bool(is_due))
            if not call.answer.done():
                call.answer.set_result(refusal)
            return
        self._open[call.held.id] = call.held
        if call.answer.done():
            self.release(call.held)  # cancelled: nobody else will
        else:
            call.answer.set_result(call.held)

    def _lose(self, batch: list[_Call]) -> None:
        """Who waits is answered without Redis. What ended is told once it is back; ending twice does nothing."""
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
