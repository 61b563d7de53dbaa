"""Guides before generation: found to be good, or refused. The work is done in a process of its own, `guide_process`.

Verdicts are kept, so that a schema that comes with every request is tried once; for each tenant by itself, so that
nobody can tell by the time it takes what others have sent. The process is started by the first guided request, and
again if it died. It has few guides of a tenant at a time: a tenant that sends many waits for its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec

import msgspec

from penstock.api.openai.guided import GuideAsked
from penstock.core.clock import Clock
from penstock.core.errors import EngineUnavailable, InvalidRequest, Overloaded, UnsupportedParameter
from penstock.core.guide import Guide
from penstock.engine.mailbox import FrameReader, frame_of
from penstock.observe import catalog
from penstock.observe.registry import Registry
from penstock.server.guide_protocol import Model, Trial, Verdict

_MAX_KEPT = 512
_MAX_OPEN = 64  # of one tenant
_MAX_AT_PROCESS = 2  # of one tenant
_PATIENCE_S = 30.0  # for the next answer to anybody, the start of the process included; it has its own limits
_verdict_decoder = msgspec.msgpack.Decoder(Verdict)


@dataclass
class _Turns:
    """One tenant's guides that have no answer yet."""

    num_open: int = 0
    at_process: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_AT_PROCESS))


class GuideTrials:
    def __init__(
        self, encoded_text: Callable[[], Awaitable[bytes]], eos_ids: Sequence[int], registry: Registry, clock: Clock
    ) -> None:
        """`encoded_text`: the model's ModelText."""
        self._registry = registry
        self._clock = clock
        self._encoded_text = encoded_text
        self._eos_ids = list(eos_ids)
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._open: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turns: dict[str, _Turns] = {}  # of tenants that have something open
        self._answered_s = 0.0
        self._is_closed = False
        self._answers: dict[int, asyncio.Future[Verdict]] = {}
        self._count = 0
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def check(self, asked: GuideAsked, tenant: str) -> Guide:
        """The guide as the engine is to have it. Raises what its sender is to read."""
        guide, param = asked
        key = blake2b(msgspec.msgpack.encode((tenant, guide)), digest_size=16).digest()
        verdict = self._kept.get(key)
        is_known = verdict is not None
        if verdict is None:
            verdict = await self._try(key, guide, tenant)
        else:
            self._kept.move_to_end(key)
        outcome = "refused" if verdict.guide is None else "known" if is_known else "new"
        self._registry.count(catalog.GUIDED_REQUESTS, guide.kind, outcome).value += 1
        if verdict.guide is None:
            kind = UnsupportedParameter if verdict.is_unsupported else InvalidRequest
            raise kind(f"{param}: {verdict.problem}", param=param)
        return verdict.guide

    async def close(self) -> None:
        self._is_closed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _try(self, key: bytes, guide: Guide, tenant: str) -> Verdict:
        """Verdict on a guide; callers that ask for the same at the same time wait for the same."""
        if key not in self._open:
            turns = self._turns.setdefault(tenant, _Turns())
            if turns.num_open >= _MAX_OPEN:
                raise Overloaded("too many new guides are being tried", retry_after_s=1.0)
            turns.num_open += 1
            self._open[key] = asyncio.create_task(self._in_turn(turns, guide))
            self._open[key].add_done_callback(lambda task: self._keep(key, tenant, task))
        return await asyncio.shield(self._open[key])

    async def _in_turn(self, turns: _Turns, guide: Guide) -> Verdict:
        async with turns.at_process:
            return await self._ask(guide)

    def _keep(self, key: bytes, tenant: str, task: asyncio.Task[Verdict]) -> None:
        del self._open[key]
        turns = self._turns[tenant]
        turns.num_open -= 1
        if not turns.num_open:
            del self._turns[tenant]
        if not task.cancelled() and task.exception() is None:
            self._kept[key] = task.result()
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)

    async def _ask(self, guide: Guide) -> Verdict:
        started_s = self._clock.now()
        process = await self._running()
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        assert process.stdin is not None
        process.stdin.write(frame_of(msgspec.msgpack.encode(Trial(self._count, guide))))
        while not answer.done():
            await asyncio.wait([answer], timeout=_PATIENCE_S)
            if not answer.done() and self._clock.now() - max(self._answered_s, started_s) >= _PATIENCE_S:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                raise EngineUnavailable("the guide could not be tried in time", retry_after_s=1.0)
        verdict: Verdict = answer.result()
        self._registry.spread(catalog.GUIDE_TRIAL_TIME).observe(self._clock.now() - started_s)
        return verdict

    async def _running(self) -> Process:
        async with self._starting:
            process = self._process
            if self._is_closed:
                raise EngineUnavailable("the server is stopping", retry_after_s=1.0)
            if process is None or _is_dead(process):
                if find_spec("llguidance") is None:
                    raise UnsupportedParameter("guided output needs llguidance: pip install 'penstock[engine]'")
                if not self._eos_ids:
                    raise UnsupportedParameter(
                        "guided output needs a model that has a token for the end of its answers"
                    )
                model = Model(await self._encoded_text(), self._eos_ids)
                arguments = ["-m", "penstock.server.guide_process"]
                process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=PIPE, stdout=PIPE)
                assert process.stdin is not None
                process.stdin.write(frame_of(msgspec.msgpack.encode(model)))
                self._process = process
                self._reading = asyncio.create_task(self._read(process))
            return process

    async def _read(self, process: Process) -> None:
        """One life of the process."""
        frames = FrameReader()
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            self._answered_s = self._clock.now()
            for verdict in map(_verdict_decoder.decode, frames.feed(data)):
                answer = self._answers.pop(verdict.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(verdict)
        await process.wait()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("what tries guides has died", retry_after_s=1.0))


def _is_dead(process: Process) -> bool:
    """Its pipe tells before its exit code does."""
    return process.returncode is not None or (process.stdin is not None and process.stdin.is_closing())
