"""Rollouts of versions that are equal, slower or broken, between real processes that are killed.

    python -m tools.drills.rollout [--slower 1.25] [--repeat 1]

Replicas take the time of a device that is not here: the slower version by a delay in each of its steps, not by load,
for all share the cores. Four verdicts:

    slower    it is found in the shadow step: no client has been served by it
    failing   every request fails: it is aborted after a few
    equal     it goes through all steps, though each of the two gateways is killed once
    held      an abort in the hold has all clients back at the old version with the next request
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from tests.gateway.provider import providing
from tests.waiting import eventually
from tools.drills.call import ask, post
from tools.drills.stand import PACED, PATIENT, Process, Stand, stand

from penstock.rollout.desk import find, start_rollout, story_of
from penstock.rollout.policy.sentences import sentence
from penstock.tenancy.rollouts import Rollout, RolloutVerb
from penstock.tenancy.store import open_store

STEP_S = 0.02
ROOMY = {"max_num_seqs": 64, "num_blocks": 8192, "chunk_tokens": 1024}  # copies are sent to replicas that have room
NUM_CLIENTS = 4
THINK_S = 1.0  # of clients in a shadow step: copies of either version are compared where as much was in flight
TOKENS = 12
_GIVE_UP_S = 900.0
SHADOW: dict[str, Any] = {"shadow": 1.0, "min_s": 60, "min_requests": 200, "max_s": 3600}
SHARES: list[dict[str, Any]] = [
    {"share": 0.25, "min_s": 10, "min_requests": 20, "max_s": 30},
    {"share": 1.0, "min_s": 10, "min_requests": 20, "max_s": 30},
]
# Times between processes that share two cores are too noisy for margins of a few percent: what must not be found in an
# equal version has wide ones.
WIDE: dict[str, Any] = {
    **{name: {"margin": 1.0} for name in ("ttft", "tpot", "latency", "ttft_p95", "tpot_p95", "latency_p95")},
    **{name: {"enabled": False} for name in ("device_time", "cost")},
}


@dataclass
class Served:
    """Answers that clients had."""

    by_old: int = 0
    by_new: int = 0
    failed: int = 0
    unreached: int = 0  # the gateway was killed
    wrong: list[str] = field(default_factory=list)

    @property
    def all(self) -> int:
        return self.by_old + self.by_new


@dataclass
class Report:
    phase: str
    reason: str
    served: Served
    story: list[str]


class Place:
    """A model of two versions behind gateways with one store."""

    def __init__(self, stand: Stand, old: str, new: str, num_gateways: int) -> None:
        versions = {
            "v1": {"replicas": [old], "weight": 100, "served_as": PACED},
            "v2": {"replicas": [new], "weight": 0, "served_as": PACED},
        }
        self.stand = stand
        self.settings = PATIENT | {"models": {"chat": {"versions": versions}}, "route_headers": True}
        self.gateways = [self.gateway() for _ in range(num_gateways)]
        self.store = open_store(stand.store)
        self.served = Served()

    def gateway(self) -> Process:
        found = self.stand.gateway(**self.settings)
        eventually(lambda: self._num_ready(found) == 2)
        return found

    @staticmethod
    def _num_ready(gateway: Process) -> int:
        return sum(one["state"] == "ready" for one in gateway.get("/admin/v1/replicas")["replicas"])

    def start(self, *steps: dict[str, Any], **plan: Any) -> Rollout:
        return start_rollout(self.store, "chat", "v2", plan={"steps": list(steps), "settle_s": 1, **plan}, by="drill")

    def rollout(self) -> Rollout:
        return find(self.store.rollouts, "chat")

    def report(self) -> Report:
        found = self.rollout()
        story = story_of(self.store.rollouts, found.id)
        lines = [f"{one.what}: {one.reason}" for one in story]
        for one in story[-3:]:
            lines += [f"    {sentence(gate, found.old)}" for gate in one.gates]
        reason = next((one.reason for one in reversed(story) if one.what in ("aborting", "holding")), "")
        return Report(found.phase, reason, self.served, lines)

    async def until(self, *phases: str, within_s: float = _GIVE_UP_S) -> None:
        async with asyncio.timeout(within_s):
            await _until(self.stand, 0.2, lambda: self.rollout().phase in phases)

    @contextlib.asynccontextmanager
    async def clients(self, count: int = NUM_CLIENTS, *, think_s: float = 0.0) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._client(number, think_s)) for number in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, number: int, think_s: float) -> None:
        served, count = self.served, 0
        while True:
            count += 1
            await asyncio.sleep(think_s)
            body = {
                "model": "chat",
                "messages": [{"role": "user", "content": f"client {number} asks for tale {count}"}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "user": f"{number}-{count}",
            }
            gateway = self.gateways[(number + count) % len(self.gateways)]
            try:
                call = await ask(gateway.port, post("/v1/chat/completions", body))
            except (OSError, TimeoutError):
                served.unreached += 1
                await asyncio.sleep(0.1)
                continue
            replica = call.headers.get("x-penstock-replica", "")
            if not call.is_whole:
                served.unreached += 1
            elif call.status != 200:
                served.failed += 1
            elif replica.startswith("chat@v2"):
                served.by_new += 1
            elif replica.startswith("chat@v1"):
                served.by_old += 1
            else:
                served.wrong.append(f"{call.status} {replica!r}")

    async def kill_gateway(self, number: int) -> None:
        """Another takes its place."""
        self.gateways[number].signal(signal.SIGKILL)
        self.gateways[number] = await asyncio.to_thread(self.gateway)

    def close(self) -> None:
        self.store.close()


@contextlib.contextmanager
def paced(directory: Path, slower: float = 1.0, num_gateways: int = 1) -> Any:
    with stand(directory) as found:
        old, new = (found.paced_replica(step_s=STEP_S * times, **ROOMY) for times in (1.0, slower))
        place = Place(found, old.url, new.url, num_gateways)
        try:
            yield place
        finally:
            place.close()


@contextlib.contextmanager
def failing(directory: Path) -> Any:
    """The new version answers each request with an error."""
    with stand(directory) as found, providing(status=500) as provider:
        place = Place(found, found.paced_replica(step_s=STEP_S, **ROOMY).url, provider.url, 1)
        try:
            yield place
        finally:
            place.close()


async def of_slower(place: Place, **plan: Any) -> Report:
    async with place.clients(think_s=THINK_S):
        place.start(SHADOW, *SHARES, **plan)
        await place.until("aborted", "promoted", "paused")
    return place.report()


async def of_failing(place: Place) -> Report:
    async with place.clients():
        place.start(*SHARES)
        await place.until("aborted", "promoted", "paused")
    return place.report()


async def of_equal(place: Place, shadow: dict[str, Any] = SHADOW, *, kills: bool = True) -> Report:
    shares = place.store.routes
    async with place.clients():
        place.start(shadow, *SHARES, gates=WIDE, alpha=1e-6, hold_s=0)
        if kills:
            await _until(place.stand, 0.1, lambda: shares.show("chat").shadow["v2"] > 0)
            await place.kill_gateway(0)
            await _until(place.stand, 0.1, lambda: shares.show("chat").weights["v2"] > 0)
            await place.kill_gateway(1)
        await place.until("aborted", "promoted", "paused")
    return place.report()


async def of_held(place: Place) -> tuple[Report, int]:
    """Returns a report, and how many answers clients had from the new version after all had heard of the abort."""
    async with place.clients():
        rollout = place.start(SHARES[-1], gates=WIDE, hold_s=600)
        await place.until("holding", "aborted", "paused")
        await asyncio.to_thread(place.store.rollouts.give, rollout.id, RolloutVerb.ABORT, by="drill")
        before = place.served.all
        await _until(place.stand, 0.02, lambda: place.served.all >= before + 3 * NUM_CLIENTS)
        late = place.served.by_new
        await place.until("aborted")
        await _until(place.stand, 0.02, lambda: place.served.all >= before + 10 * NUM_CLIENTS)
    return place.report(), place.served.by_new - late


async def _until(stand: Stand, every_s: float, is_so: Callable[[], bool]) -> None:
    """Raises RuntimeError as soon as a process of the stand dies: what it was to bring about would never come."""
    async with asyncio.timeout(_GIVE_UP_S):
        while not is_so():
            stand.check_all_run()
            await asyncio.sleep(every_s)


async def drill(directory: Path, slower: float) -> list[str]:
    """Returns what went wrong."""
    wrong: list[str] = []

    def check(name: str, report: Report, expected: str, *more: tuple[bool, str]) -> None:
        served = report.served
        print(f"{name}: {report.phase}; old {served.by_old}, new {served.by_new}, failed {served.failed}")
        print(*(f"    {line}" for line in report.story), sep="\n", flush=True)
        if report.phase != expected:
            wrong.append(f"{name}: {report.phase}, not {expected}")
        wrong.extend(f"{name}: {said}" for is_wrong, said in more if is_wrong)
        wrong.extend(f"{name}: {said}" for said in served.wrong[:3])

    with paced(directory / "slower", slower) as place:
        report = await of_slower(place)
        check("slower", report, "aborted", (report.served.by_new > 0, "clients were served by it"))
    with failing(directory / "failing") as place:
        report = await of_failing(place)
        check("failing", report, "aborted", (report.served.failed > 200, "many requests failed"))
    with paced(directory / "equal", num_gateways=2) as place:
        report = await of_equal(place)
        check("equal", report, "promoted", (report.served.failed > 0, "requests failed"))
    with paced(directory / "held") as place:
        report, late = await of_held(place)
        check("held", report, "aborted", (late > 0, f"{late} answers of the new version after the abort"))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=1.25, help="than the old version, its steps")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    wrong: list[str] = []
    for _ in range(arguments.repeat):
        with tempfile.TemporaryDirectory() as name:
            for part in ("slower", "failing", "equal", "held"):
                (Path(name) / part).mkdir()
            wrong += uvloop.run(drill(Path(name), arguments.slower))
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
