"""Spot capacity that is taken away: by a metadata endpoint, by a SIGTERM, and by an operator's interruption notice.

    python -m tools.drills.spot [--model smollm2] [--tokens 1500]

Half of a pool may be spot capacity. Each time its replacement must start before the replica goes, and every answer must
end as if nothing had happened; the replica is gone before its deadline. Where spot capacity is refused, the pool runs
on demand, and returns to spot when it is offered again.
"""

from __future__ import annotations

import asyncio
import http.server
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from tools.drills.fleet_stand import RealFleet
from tools.drills.fleet_watch import FleetReport, FleetWatch, drill_command, exercise

_NUM_CLIENTS = 4
_NOTICE_S = 40.0
_OWN_DRAIN_S = 30.0  # how long a replica that got a SIGTERM may still work
POOL_SETTINGS: dict[str, Any] = {
    "min": 1,
    "max": 5,
    "scale_on": {"active_sequences": 4},  # of four clients: two replicas, of which one must be on demand
    "up_cooldown_s": 2.0,
    "standby": 0,
    "parked": 0,
    "price_per_hour": 2.0,
    "spot": {"share": 0.5, "price_per_hour": 0.5, "retry_s": 3.0},
    "hold_s": 240.0,
    "predict": False,
}


class MetadataEndpoint:
    """A cloud's: 404, or an end of this machine in AWS's form."""

    def __init__(self) -> None:
        self.ends_at: datetime | None = None
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                at = endpoint.ends_at
                body = b"" if at is None else b'{"action": "terminate", "time": "%b"}' % at.isoformat().encode()
                self.send_response(200 if body else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/latest/meta-data/spot/instance-action"
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield
            server.shutdown()


def has_spot(watch: FleetWatch) -> bool:
    """Whether one replica is on spot capacity, which stays within its share, and the others are on demand."""
    return len(watch.active) >= 2 and sum(one.capacity_type == "spot" for one in watch.active) == 1


def is_on_demand(watch: FleetWatch) -> bool:
    return len(watch.active) >= 2 and all(one.capacity_type == "on_demand" for one in watch.rows.values())


async def taken_away(
    watch: FleetWatch, name: str, deadline_s: float, notice: Callable[[str], Awaitable[object]]
) -> None:
    """One notice to the spot replica: a replacement is there before it goes, and it goes before its deadline."""
    async with watch.phase(name, _NUM_CLIENTS) as phase:
        (leaving,) = [one.id for one in watch.active if one.capacity_type == "spot"]
        before, open_at = set(watch.rows), watch.load.num_open
        began = monotonic()
        await notice(leaving)
        await watch.until("a replacement", lambda: watch.rows.keys() - before)
        replacement_s = monotonic() - began
        watch.expect(leaving in watch.rows, f"{name}: {leaving} was gone before its replacement began")
        await watch.until("it is gone", lambda: leaving not in watch.rows)
        gone_s = monotonic() - began
        watch.expect(gone_s <= deadline_s, f"{name}: gone after {gone_s:.1f} s, with {deadline_s:.0f} s left")
        await watch.until("spot again", lambda: has_spot(watch))
        await watch.settled()
        phase.seen = f"{open_at} answers open; replacement begun in {replacement_s:.1f} s, gone in {gone_s:.1f} s"


async def play(fleet: RealFleet, endpoint: MetadataEndpoint, tokens: int) -> FleetReport:
    fleet.start_controller()
    watch = await FleetWatch.begin(fleet, tokens)
    async with watch.phase("half on spot", _NUM_CLIENTS):
        await watch.until("one on spot", lambda: has_spot(watch))
        await watch.answers(_NUM_CLIENTS)

    async def interrupt(replica: str) -> None:
        await asyncio.to_thread(fleet.run, "replicas", "interrupt", replica, "--seconds", f"{_NOTICE_S:g}")

    async def terminate(replica: str) -> None:
        watch.killed.add(replica)  # it may have ended by itself before anybody decides to stop it
        fleet.signal_server(replica, signal.SIGTERM)

    async def announce(replica: str) -> None:
        endpoint.ends_at = datetime.now(UTC) + timedelta(seconds=_NOTICE_S)
        await watch.until("the notice is read", lambda: watch.rows[replica].deadline is not None)
        endpoint.ends_at = None

    await taken_away(watch, "interrupted by an operator", _NOTICE_S, interrupt)
    await taken_away(watch, "SIGTERM", _OWN_DRAIN_S, terminate)
    await taken_away(watch, "metadata endpoint", _NOTICE_S, announce)
    async with watch.phase("spot is refused", _NUM_CLIENTS) as phase:
        await asyncio.to_thread(fleet.run, "fleet", "drain", "spot", "--seconds", "40")
        refused_s = await watch.until("all on demand", lambda: is_on_demand(watch))
        await watch.settled()
        phase.seen = f"all on demand after {refused_s:.1f} s"
    async with watch.phase("spot is offered again", _NUM_CLIENTS) as phase:
        await asyncio.to_thread(fleet.run, "fleet", "uncordon", "spot")
        offered_s = await watch.until("one on spot again", lambda: has_spot(watch))
        await watch.settled()
        phase.seen = f"one on spot after {offered_s:.1f} s"
    return await watch.finish()


def run(directory: Path, model: str | None, tokens: int) -> FleetReport:
    endpoint = MetadataEndpoint()
    with endpoint.serving():
        settings = {"interruption_url": endpoint.url}
        return exercise(directory, model, lambda fleet: play(fleet, endpoint, tokens), POOL_SETTINGS, settings)


if __name__ == "__main__":
    drill_command(__doc__, run)
