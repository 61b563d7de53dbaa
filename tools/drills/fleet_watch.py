"""The watch that a drill keeps on a fleet: its replicas over time, phase by phase, and promises that were broken."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop
from tools.drills.fleet_load import CheckedLoad, Tally
from tools.drills.fleet_stand import PATIENCE_S, RealFleet, real_fleet, wait_for_service
from tools.drills.stand import write_model

from penstock.fleet.policy.decision import ActionKind
from penstock.tenancy.fleet import FleetReplica

_LOOK_S = 0.1
_CONTEXT = 1 << 16


@dataclass
class Phase:
    name: str
    num_clients: int
    seconds: float
    num_active: tuple[int, int]  # the least and the most at a time
    tally: Tally
    seen: str = ""


@dataclass
class FleetReport:
    phases: list[Phase] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def print(self) -> None:
        print(
            f"{'phase':26} {'clients':>7} {'took':>7} {'active':>7} {'whole':>6} {'refused':>7} {'broken':>6}", end=""
        )
        print(f" {'longest gap':>11} {'first byte':>10}  seen")
        for one in self.phases:
            tally, (least, most) = one.tally, one.num_active
            active = f"{least}..{most}" if least != most else str(least)
            print(f"{one.name:26} {one.num_clients:7} {one.seconds:5.1f} s {active:>7} {tally.num_whole:6}", end="")
            print(f" {tally.num_refused:7} {len(tally.wrong):6} {tally.longest_gap_s:9.1f} s", end="")
            print(f" {tally.longest_wait_s:8.1f} s  {one.seen}")
        for line in self.wrong:
            print(f"BROKEN: {line}")
        print("no promise was broken" if not self.wrong else f"{len(self.wrong)} promises were broken", flush=True)


class FleetWatch:
    """Looks at the store again and again while a drill runs."""

    def __init__(self, fleet: RealFleet, load: CheckedLoad) -> None:
        self.fleet = fleet
        self.load = load
        self.report = FleetReport()
        self.rows: dict[str, FleetReplica] = {}
        self.ever: dict[str, FleetReplica] = {}  # every replica, as it was last seen
        self.killed: set[str] = set()  # by the drill
        self._active: list[int] = []

    @classmethod
    async def begin(cls, fleet: RealFleet, tokens: int) -> FleetWatch:
        """Begins once the gateway has answered a request, for which a pool at zero starts its first replica."""
        await asyncio.to_thread(wait_for_service, fleet)
        load = CheckedLoad(fleet.gateway[1], tokens)
        await load.learn()
        return cls(fleet, load)

    async def finish(self) -> FleetReport:
        await self.load.stop()
        self.report.wrong += self.load.take_tally().wrong
        self.check_decisions()
        self.check_nothing_orphaned()
        return self.report

    def kill(self, *replicas: str) -> int:
        """Kills these replicas' processes, all at once. Returns how many answers were open."""
        self.killed.update(replicas)
        for replica in replicas:
            self.fleet.signal(replica, signal.SIGKILL)
        return self.load.num_open

    @asynccontextmanager
    async def phase(self, name: str, num_clients: int) -> AsyncIterator[Phase]:
        self.load.resize(num_clients)
        self.load.take_tally()
        began, self._active = monotonic(), []
        self.look()
        found = Phase(name, num_clients, 0.0, (0, 0), Tally())
        yield found
        found.seconds = monotonic() - began
        found.num_active = min(self._active), max(self._active)
        found.tally = self.load.take_tally()
        self.report.phases.append(found)
        self.report.wrong += [f"{name}: {line}" for line in found.tally.wrong]

    async def until(self, what: str, is_so: Callable[[], object], within_s: float = PATIENCE_S) -> float:
        """Seconds that it took. A wait that is too long is a broken promise, and the drill goes on."""
        began = monotonic()
        while self.look() and not is_so():
            if monotonic() - began > within_s:
                self.report.wrong.append(f"after {within_s:.0f} s: not {what}")
                break
            await asyncio.sleep(_LOOK_S)
        return monotonic() - began

    async def answers(self, number: int) -> None:
        """Waits for so many whole answers."""
        wanted = self.load.tally.num_whole + number
        await self.until(f"{number} answers", lambda: self.load.tally.num_whole >= wanted)

    async def settled(self) -> None:
        """Waits until every answer that is open now has ended: none has two misfortunes at once."""
        before = self.load.open_calls()
        await self.until("all answers ended", lambda: not before & self.load.open_calls())

    def look(self) -> bool:
        self.rows = self.fleet.replicas()
        self.ever |= self.rows
        self._active.append(len(self.active))
        return True

    @property
    def active(self) -> list[FleetReplica]:
        """The oldest first. One that was interrupted counts as long as it serves."""
        found = [one for one in self.rows.values() if one.state == "active" and one.id not in self.killed]
        return sorted(found, key=lambda one: one.created_at)

    def expect(self, is_so: object, what: str) -> None:
        if not is_so:
            self.report.wrong.append(what)

    def check_decisions(self) -> None:
        """Every change of a pool's size and every replica is explained."""
        decisions = self.fleet.decisions()
        actions = [action for one in decisions for action in one.actions]
        for one in decisions:
            self.expect(one.reason, f"a decision at {one.at:.1f} without a reason: {one}")
        self.expect(all(action.reason for action in actions), "an action without a reason")
        starts = sum(action.kind is ActionKind.START for action in actions)
        self.expect(starts >= len(self.ever), f"{len(self.ever)} replicas, and decisions to start {starts}")
        stopped = {action.replica for action in actions if action.kind is ActionKind.STOP}
        refused = {one.id for one in self.ever.values() if one.state == "starting" and not one.url}  # by the driver
        for name in self.ever.keys() - self.rows.keys() - stopped - self.killed - refused:
            self.expect(False, f"nobody decided to stop {name}: {self.ever[name].failure}")

    def check_nothing_orphaned(self) -> None:
        """Processes, directories and rows name the same replicas."""
        self.look()
        directories = {path.name for path in replica_directories(self.fleet)}
        self.expect(directories == set(self.rows), f"directories {directories}, and rows {set(self.rows)}")
        running = {one for one in self.ever if any(one in line for line in self.fleet.processes())}
        self.expect(running == set(self.rows), f"processes {running}, and rows {set(self.rows)}")


def replica_directories(fleet: RealFleet) -> list[Path]:
    return [*(fleet.home / "fleet" / "penstock" / "replicas").iterdir()]


def exercise(
    directory: Path,
    model: str | None,
    play: Callable[[RealFleet], Coroutine[Any, Any, FleetReport]],
    pool: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
) -> FleetReport:
    """One drill on a fleet of its own, which is taken down afterwards. `model`: None has its weights made up."""
    shape = write_model(directory / "model", _CONTEXT) if model is None else model
    with real_fleet(directory, shape, settings=settings, **pool) as fleet:
        report = uvloop.run(play(fleet))
    if left := fleet.processes():
        report.wrong.append(f"after the end there still run: {left}")
    return report


def drill_command(text: str | None, run: Callable[[Path, str | None, int], FleetReport]) -> None:
    """The command of a drill: prints its table, and exits with 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of each replica (default: a small one whose weights are made up)")
    parser.add_argument("--tokens", type=int, default=1500, help="of an answer (default: 1500)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(Path(directory), arguments.model, arguments.tokens)
    report.print()
    sys.exit(bool(report.wrong))
