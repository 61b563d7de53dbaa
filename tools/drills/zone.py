"""The loss of a zone: its replicas are killed at once and none can be started there, until it comes back.

    python -m tools.drills.zone [--model smollm2] [--tokens 1500]

A pool over two zones. Every answer of the lost zone must go on in the other one and end as if nothing had happened; the
lost share is started there; when the zone comes back, the pool is spread over both again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from tools.drills.fleet_stand import RealFleet
from tools.drills.fleet_watch import FleetReport, FleetWatch, drill_command, exercise

ZONES = ("east", "west")
_NUM_CLIENTS = 6
POOL_SETTINGS: dict[str, Any] = {
    "min": 4,
    "max": 5,
    "standby": 0,
    "parked": 0,
    "scale_on": {"active_sequences": 1000},  # as many as `min`, however busy the machine is
    "zones": list(ZONES),
    "spot": {"retry_s": 3.0},
    "hold_s": 240.0,
    "predict": False,
}


def spread(watch: FleetWatch) -> dict[str, int]:
    """Active replicas by zone."""
    return dict(Counter(dict.fromkeys(ZONES, 0)) + Counter(one.zone for one in watch.active))


async def play(fleet: RealFleet, tokens: int) -> FleetReport:
    fleet.start_controller()
    watch = await FleetWatch.begin(fleet, tokens)
    async with watch.phase("spread over two zones", _NUM_CLIENTS):
        await watch.until("two replicas in each zone", lambda: spread(watch) == {"east": 2, "west": 2})
        await watch.answers(_NUM_CLIENTS)
    async with watch.phase("west is lost", _NUM_CLIENTS) as phase:
        await asyncio.to_thread(fleet.run, "fleet", "cordon", "west")
        hit = watch.kill(*(one.id for one in watch.active if one.zone == "west"))
        replaced_s = await watch.until("its share in east", lambda: spread(watch) == {"east": 4})
        await watch.settled()
        phase.seen = f"{hit} answers open; two replicas started in east in {replaced_s:.1f} s"
    async with watch.phase("west is back", _NUM_CLIENTS) as phase:
        await asyncio.to_thread(fleet.run, "fleet", "uncordon", "west")
        back_s = await watch.until("spread again", lambda: spread(watch) == {"east": 2, "west": 2})
        phase.seen = f"two in each zone again after {back_s:.1f} s"
    async with watch.phase("east is drained", _NUM_CLIENTS) as phase:
        await asyncio.to_thread(fleet.run, "fleet", "drain", "east", "--seconds", "60")
        drained_s = await watch.until("all in west", lambda: {one.zone for one in watch.rows.values()} == {"west"})
        await watch.until("four replicas", lambda: spread(watch) == {"west": 4})
        await watch.settled()
        phase.seen = f"nothing left in east after {drained_s:.1f} s"
    return await watch.finish()


def run(directory: Path, model: str | None, tokens: int) -> FleetReport:
    return exercise(directory, model, lambda fleet: play(fleet, tokens), POOL_SETTINGS)


if __name__ == "__main__":
    drill_command(__doc__, run)
