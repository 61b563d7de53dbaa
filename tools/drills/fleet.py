"""A fleet whose demand rises, falls, spikes and goes silent, while its parts are killed, stopped and interrupted.

    python -m tools.drills.fleet [--model smollm2] [--tokens 1500]

A real controller, gateway and replicas. Replicas are killed with -9, stopped for a while and interrupted, and the
controller is killed with -9 and started again. Every answer must be whole and the one that a quiet fleet gives; nothing
else counts but refusals with a reason and a Retry-After. The number of replicas follows, down to none and back; each
change has a decision that explains it; nothing is left over.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from time import monotonic
from typing import Any

from tools.drills.fleet_stand import RealFleet
from tools.drills.fleet_watch import FleetReport, FleetWatch, drill_command, exercise

_HUNG_S = 5.0  # a gateway takes it for hung after three
_CONTROLLER_GONE_S = 3.0
_NOTICE_S = 20.0
POOL_SETTINGS: dict[str, Any] = {
    "min": 0,
    "max": 3,
    "scale_on": {"active_sequences": 3},
    "up_cooldown_s": 2.0,
    "down_cooldown_s": 5.0,
    "idle_s": 5.0,
    "hold_s": 240.0,
    "predict": False,
}


async def play(fleet: RealFleet, tokens: int) -> FleetReport:
    controller = fleet.start_controller()
    watch = await FleetWatch.begin(fleet, tokens)
    load = watch.load
    async with watch.phase("calm", 2):
        await watch.until("one replica", lambda: len(watch.active) == 1)
        await watch.answers(4)
    async with watch.phase("rise; one killed -9", 9) as phase:
        rise_s = await watch.until("two replicas", lambda: len(watch.active) >= 2)
        hit = watch.kill(watch.active[0].id)
        again_s = await watch.until("two replicas again", lambda: len(watch.active) >= 2)
        phase.seen = f"2 replicas after {rise_s:.1f} s, {hit} answers open at the kill, replaced in {again_s:.1f} s"
        await watch.settled()
    async with watch.phase("one stopped for a while", 9) as phase:
        stopped = watch.active[0].id
        phase.seen = f"{load.num_open} answers open"
        fleet.signal(stopped, signal.SIGSTOP)
        await asyncio.sleep(_HUNG_S)
        fleet.signal(stopped, signal.SIGCONT)
        await watch.settled()
    async with watch.phase("fall", 1) as phase:
        fall_s = await watch.until("one replica", lambda: len(watch.active) == 1)
        phase.seen = f"1 replica after {fall_s:.1f} s"
    async with watch.phase("spike; one interrupted", 12) as phase:
        spike_s = await watch.until("three replicas", lambda: len(watch.active) == 3)
        leaving, began = watch.active[0].id, monotonic()
        await asyncio.to_thread(fleet.run, "replicas", "interrupt", leaving, "--seconds", f"{_NOTICE_S:g}")
        controller.kill()
        controller.wait()
        await watch.answers(6)
        await asyncio.sleep(_CONTROLLER_GONE_S)
        controller = fleet.start_controller()
        await watch.until(f"{leaving} gone", lambda: leaving not in watch.rows)
        gone_s = monotonic() - began
        await watch.until("three replicas again", lambda: len(watch.active) == 3)
        phase.seen = f"3 replicas after {spike_s:.1f} s; controller killed -9, interrupted one gone in {gone_s:.1f} s"
        watch.killed.add(leaving)  # its notice may have ended it while nobody decided anything
    watch.check_nothing_orphaned()
    async with watch.phase("silence", 0) as phase:
        zero_s = await watch.until(
            "none but parked ones", lambda: {one.state for one in watch.rows.values()} <= {"parked"}
        )
        phase.seen = f"none, or {len(watch.rows)} parked, after {zero_s:.1f} s"
    async with watch.phase("back from zero", 2) as phase:
        back_s = await watch.until("one replica", lambda: len(watch.active) == 1)
        await watch.answers(4)
        phase.seen = f"first replica after {back_s:.1f} s"
    return await watch.finish()


def run(directory: Path, model: str | None, tokens: int) -> FleetReport:
    return exercise(directory, model, lambda fleet: play(fleet, tokens), POOL_SETTINGS)


if __name__ == "__main__":
    drill_command(__doc__, run)
