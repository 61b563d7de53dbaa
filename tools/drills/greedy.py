"""One tenant sends all it can to a replica while another sends a chat now and then.

    python -m tools.drills.greedy [--chats 40]

The chats are measured three times: alone, beside the greedy tenant, and beside as much of their own tenant's. In the
last case they wait behind it, as they would if the engine knew no tenants. Every chat must say what it says alone, and
beside another tenant its first token must come far sooner than behind its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import uvloop
from tests.waiting import eventually
from tools.drills.call import Call, begin, post
from tools.drills.pressure import CONTEXT, asked
from tools.drills.stand import Process, Stand, stand

REPLICA = ("--max-num-seqs", "16", "--max-open", "256", "--chunk-tokens", "256")
GREEDY = 48  # requests of the greedy tenant, at all times
_PAUSE_S = 0.15  # between chats


@dataclass(frozen=True)
class Report:
    name: str
    ttft_s: list[float]
    texts: list[str]
    busy: int  # requests of the greedy tenant that were answered meanwhile

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def p95_s(self) -> float:
        return sorted(self.ttft_s)[int(0.95 * len(self.ttft_s))]


async def chat(replica: Process, number: int, tenant: str) -> Call:
    body = asked(9000 + number, 100, 8)
    call = await begin(replica.port, post("/v1/completions", body, x_penstock_tenant=f"{tenant} 1 1"))
    return await call.ended


@contextlib.asynccontextmanager
async def greedy(replica: Process, tenant: str, num_open: int) -> AsyncIterator[list[int]]:
    """Long prompts and long answers, by turns; yields the number of those that were answered, in a list."""
    done, numbers = [0], count()

    async def one() -> None:
        while True:
            number = next(numbers)
            lengths = (2000, 10) if number % 2 else (50, 300)
            request = post("/v1/completions", asked(number, *lengths), x_penstock_tenant=f"{tenant} 1 1")
            call = await begin(replica.port, request)
            try:
                await call.ended
            finally:
                call.leave()
            done[0] += 1

    tasks = [asyncio.create_task(one()) for _ in range(num_open)]
    try:
        yield done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(eventually, replica.num_open, lambda count: count == 0)


async def measure(name: str, replica: Process, num_chats: int, crowd: str | None) -> Report:
    async with greedy(replica, crowd or "", 0 if crowd is None else GREEDY) as done:
        await asyncio.sleep(2.0 if crowd is not None else 0.0)
        began, calls = done[0], []
        for number in range(num_chats):
            calls.append(await chat(replica, number, "light"))
            await asyncio.sleep(_PAUSE_S)
        assert all(call.status == 200 for call in calls)
        return Report(
            name, [call.first_s - call.asked_s for call in calls], [call.text for call in calls], done[0] - began
        )


async def drill(replica: Process, num_chats: int) -> list[Report]:
    """Measures a tenant alone, beside another tenant, and behind its own requests."""
    return [
        await measure("alone", replica, num_chats, None),
        await measure("beside a greedy tenant", replica, num_chats, "greedy"),
        await measure("behind its own requests", replica, max(3, num_chats // 8), "light"),
    ]


async def run(place: Stand, num_chats: int) -> bool:
    replica = place.replica(*REPLICA)
    await asyncio.to_thread(eventually, replica.is_ready)
    reports = await drill(replica, num_chats)
    print(f"{'a chat':26} {'TTFT p50':>10} {'p95':>10} {'answered meanwhile':>20}")
    for report in reports:
        print(f"{report.name:26} {report.median_s * 1e3:7.0f} ms {report.p95_s * 1e3:7.0f} ms {report.busy:20}")
    alone, beside, behind = reports
    return beside.texts == alone.texts and beside.p95_s < behind.median_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=40, help="of the other tenant, one after the other")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory), context=CONTEXT) as place:
        sys.exit(not uvloop.run(run(place, arguments.chats)))


if __name__ == "__main__":
    main()
