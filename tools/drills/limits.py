"""A tenant's tokens, counted from outside: 64 clients at four gateways ask for as much as they may.

    python -m tools.drills.limits [--seconds 300] [--counting shared,redis-closed,redis-open]

In every window of 60 seconds the answers' usage, by the time of admission, stays within the limit, and the clients get
at least 95 % of it for each minute; who comes back when told is let in. Half-way one gateway is killed: what it held is
free again within ten seconds, and no usage older than a second is lost. With Redis, a real Valkey is killed as well and
started again a second later; fail-open then means that the outage itself is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop
from tests.tenancy.limits.valkey import ValkeyProcess
from tests.tenancy.limits.windows import Admission, fullest_window
from tools.drills.call import Call, ask, begin, post
from tools.drills.stand import MODEL, Process, Stand, stand

LIMIT = 30_000  # tokens per minute
CLIENTS, GATEWAYS, HELD = 64, 4, 8
_TOKENS = 60
_OUTAGE_S = 1.0
_FORGOTTEN_S = 75.0  # whoever kept the promises may have died with them; the longest wait that was told, and some more


@dataclass
class Answered:
    gateway: Process
    asked_s: float
    admitted_s: float  # not later than this
    ended_s: float
    tokens: int


@dataclass
class Count:
    """The answers and refusals that the clients saw."""

    answers: list[Answered] = field(default_factory=list)
    num_lost: int = 0  # answers that a killed gateway took with it
    refused_s: list[float] = field(default_factory=list)
    broken_s: list[float] = field(default_factory=list)  # when somebody came as told, and was refused again
    reasons: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    counting: str
    seconds: float
    fullest: float  # of all minutes, as a share of the limit
    share: float  # of the limit, for each minute
    num_admitted: int
    num_refused: int
    num_broken: int
    freed_s: float  # from the kill until what the gateway held could be used again
    lost_tokens: int  # of usage older than a second
    wrong: list[str]

    @property
    def is_good(self) -> bool:
        held = self.fullest <= 1 and self.share >= 0.95 and self.freed_s <= 10.0 and self.lost_tokens == 0
        return held and not self.num_broken and not self.wrong


class Crowd:
    def __init__(self, gateways: list[Process], key: str) -> None:
        self._gateways = gateways
        self._key = key
        self.count = Count()

    async def client(self, name: int, until: float) -> None:
        turn = 0
        while monotonic() < until:
            prompt = f"client {name} asks {turn} times about the quick brown fox"
            body = {"model": MODEL, "prompt": prompt, "max_tokens": _TOKENS, "seed": turn}
            turn += await self._until_let_in(name, post("/v1/completions", body, self._key), until)

    async def _until_let_in(self, name: int, request: bytes, until: float) -> int:
        was_told = False
        while monotonic() < until:
            running = [gateway for gateway in self._gateways if gateway.is_running]
            gateway = running[name % len(running)]
            try:
                call = await ask(gateway.port, request)
            except OSError:
                continue  # it was just killed
            if call.status == 200:
                usage = call.usage["total_tokens"]
                self.count.answers.append(Answered(gateway, call.asked_s, call.head_s, call.ended_s, usage))
                return 1
            if not call.is_whole:
                self.count.num_lost += 1
                return 1
            was_told = self._refused(call, was_told)
            await asyncio.sleep(min(float(call.headers.get("retry-after", 1)), max(0.0, until - monotonic())))
        return 1

    def _refused(self, call: Call, was_told: bool) -> bool:
        """Whether the time it was told now is a promise: it is not, while nobody counts."""
        if call.status != 429 or "retry-after" not in call.headers:
            self.count.wrong.append(f"status {call.status}: {call.body[:100]!r}")
            return False
        reason = call.json()["error"]["reason"]
        self.count.reasons.add(reason)
        self.count.refused_s.append(call.asked_s)
        if was_told and reason != "limiter_unavailable":
            self.count.broken_s.append(call.asked_s)
        return bool(reason != "limiter_unavailable")


async def held_by(gateway: Process, key: str) -> list[Call]:
    """Streams that take every slot of their tenant."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 30_000, "stream": True, "ignore_eos": True}
    calls = [await begin(gateway.port, post("/v1/completions", body, key)) for _ in range(HELD)]
    await asyncio.gather(*(call.at_event(1) for call in calls))
    assert all(call.status == 200 for call in calls), [call.status for call in calls]
    return calls


async def freed(gateway: Process, key: str) -> float:
    """Returns how long it takes until a slot can be had."""
    began = monotonic()
    while True:
        body = {"model": MODEL, "prompt": "is there room now?", "max_tokens": 1}
        if (await ask(gateway.port, post("/v1/completions", body, key))).status == 200:
            return monotonic() - began
        await asyncio.sleep(0.1)


async def run(place: Stand, counting: str, seconds: float) -> Report:
    settings: dict[str, Any] = {}
    valkey = None
    if counting != "shared":
        valkey = ValkeyProcess(place.directory)
        settings = {"limiter": valkey.url, "without_limiter": counting.removeprefix("redis-")}
    try:
        replica = place.replica("--max-num-seqs", "256")
        key = place.tenant("acme", "--tokens-per-minute", str(LIMIT))
        slots = place.tenant("slots", "--concurrency", str(HELD))
        gateways = [place.gateway(replica, **settings) for _ in range(GATEWAYS)]
        return await _run(place, counting, seconds, gateways, key, slots, valkey)
    finally:
        if valkey is not None:
            valkey.kill()


async def _run(
    place: Stand,
    counting: str,
    seconds: float,
    gateways: list[Process],
    key: str,
    slots: str,
    valkey: ValkeyProcess | None,
) -> Report:
    crowd = Crowd(gateways, key)
    began, victim = monotonic(), gateways[-1]
    until = began + seconds
    clients = [asyncio.create_task(crowd.client(name, until)) for name in range(CLIENTS)]
    await asyncio.sleep(seconds / 3)
    outage = (until, until)
    if valkey is not None:
        outage = (monotonic(), monotonic() + _OUTAGE_S + 3.0)  # until it is connected, and counts, again
        await asyncio.to_thread(valkey.kill)
        await asyncio.sleep(_OUTAGE_S)
        await asyncio.to_thread(valkey.start)
        await asyncio.sleep(3.0)
    await held_by(victim, slots)
    await asyncio.sleep(max(0.0, began + seconds / 2 - monotonic()))
    victim.signal(signal.SIGKILL)
    killed_s = monotonic()
    freed_s = await freed(gateways[0], slots)
    await asyncio.gather(*clients)
    await asyncio.sleep(1.0)
    count = crowd.count
    safe = [a for a in count.answers if a.gateway is not victim or a.ended_s < killed_s - 1.0]
    recorded = await asyncio.to_thread(place.usage, "acme")
    num_recorded = recorded["input_tokens"] + recorded["output_tokens"]

    def is_out(answered: Answered) -> bool:
        return outage[0] <= answered.asked_s < outage[1]

    counted = [a for a in count.answers if counting != "redis-open" or not is_out(a)]
    admissions = [Admission(a.asked_s, a.admitted_s, a.tokens) for a in counted]
    ended = max(a.admitted_s for a in count.answers)
    got = sum(a.tokens for a in count.answers if not is_out(a))
    broken = [at for at in count.broken_s if not any(0 <= at - lost < _FORGOTTEN_S for lost in (outage[0], killed_s))]
    return Report(
        counting=counting,
        seconds=ended - began,
        fullest=fullest_window(admissions) / LIMIT,
        share=got / (LIMIT * max(1, seconds // 60)),
        num_admitted=len(count.answers),
        num_refused=len(count.refused_s),
        num_broken=len(broken),
        freed_s=freed_s,
        lost_tokens=max(0, sum(a.tokens for a in safe) - num_recorded),
        wrong=count.wrong + place.complaints(),
    )


HEAD = (
    f"{'counting':13} {'seconds':>7} {'admitted':>8} {'refused':>7} {'broken':>6} {'fullest':>8} {'got':>6} "
    f"{'freed':>6} {'lost':>5}"
)


def line(report: Report) -> str:
    return (
        f"{report.counting:13} {report.seconds:7.1f} {report.num_admitted:8} {report.num_refused:7} "
        f"{report.num_broken:6} {report.fullest:8.4f} {report.share:6.1%} "
        f"{report.freed_s:4.1f} s {report.lost_tokens:5}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--counting", default="shared,redis-closed,redis-open")
    arguments = parser.parse_args()
    print(HEAD, flush=True)
    is_good = True
    for counting in arguments.counting.split(","):
        with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
            report = uvloop.run(run(place, counting, arguments.seconds))
        print(line(report), flush=True)
        for what in report.wrong[:5]:
            print(f"    {what}")
        is_good &= report.is_good
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
