"""The effect of one tenant's tenfold spike on the others: their time to a first token, before it and while it lasts.

    python -m tools.drills.spike [--seconds 30] [--rate 2.5] [--tenants 4]

Every tenant asks at a steady rate, streaming; then one of them asks ten times as often, which is more than the replicas
can take (two paced ones: `paced_replica`). The others' p95 must stay within 1.2 times what it was; who spikes waits, or
is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import uvloop
from tools.drills.call import ask, post
from tools.drills.stand import PACED, Stand, stand

REPLICAS = 2
STEP_S, SLOTS, OUTPUT = 0.03, 16, 40  # which is 26 requests a second
_WORDS = tuple("the quick brown fox jumps over the lazy dog and we will see what they have done".split())  # noqa: SIM905


@dataclass
class Waits:
    """The waits of one phase: seconds to the first token."""

    others: list[float] = field(default_factory=list)
    spiking: list[float] = field(default_factory=list)
    num_refused: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Report:
    before: Waits
    during: Waits

    @property
    def ratio(self) -> float:
        return p(0.95, self.during.others) / p(0.95, self.before.others)

    @property
    def is_good(self) -> bool:
        return self.ratio <= 1.2 and not self.before.wrong and not self.during.wrong


def p(share: float, values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


async def one(port: int, key: str, rng: random.Random, waits: Waits, is_spiking: bool) -> None:
    prompt = " ".join(rng.choices(_WORDS, k=80))
    body = {"model": PACED, "prompt": prompt, "max_tokens": OUTPUT, "stream": True, "ignore_eos": True}
    call = await ask(port, post("/v1/completions", body, key))
    if call.status == 200:
        (waits.spiking if is_spiking else waits.others).append(call.first_s - call.asked_s)
    elif call.status == 429 and is_spiking:
        waits.num_refused += 1
    else:
        waits.wrong.append(f"status {call.status}: {call.body[:200]!r}")


async def phase(port: int, keys: list[str], rates: list[float], seconds: float, seed: int) -> Waits:
    """Arrivals are random, each tenant's at its rate."""
    waits, calls = Waits(), []
    until = monotonic() + seconds

    async def tenant(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        due = monotonic()
        while (due := due + rng.expovariate(rates[number])) < until:
            await asyncio.sleep(max(0.0, due - monotonic()))
            calls.append(asyncio.create_task(one(port, keys[number], rng, waits, number == 0)))

    await asyncio.gather(*(tenant(number) for number in range(len(keys))))
    await asyncio.gather(*calls)
    return waits


async def drill(place: Stand, *, seconds: float, rate: float, num_tenants: int, warm_s: float = 3.0) -> Report:
    keys = [place.tenant(f"tenant-{number}") for number in range(num_tenants)]
    pace = {"step_s": STEP_S, "max_num_seqs": SLOTS, "chunk_tokens": 256, "num_blocks": 4096}
    gateway = place.gateway(*(place.paced_replica(**pace) for _ in range(REPLICAS)), model=PACED)
    steady = [rate] * num_tenants
    await phase(gateway.port, keys, steady, warm_s, seed=0)  # so that everything is warm
    before = await phase(gateway.port, keys, steady, seconds, seed=1)
    during = await phase(gateway.port, keys, [10 * rate, *steady[1:]], seconds, seed=1)
    during.wrong += place.complaints()
    return Report(before, during)


def show(report: Report) -> None:
    print(f"{'':8} {'others':>7} {'TTFT p50':>9} {'p95':>8} {'p99':>8} {'the one':>8} {'p95':>8} {'refused':>8}")
    for name, waits in (("before", report.before), ("during", report.during)):
        others = " ".join(f"{1000 * p(share, waits.others):5.0f} ms" for share in (0.5, 0.95, 0.99))
        spiking = f"{1000 * p(0.95, waits.spiking):5.0f} ms"
        print(f"{name:8} {len(waits.others):7}  {others} {len(waits.spiking):8} {spiking} {waits.num_refused:8}")
        for what in waits.wrong[:5]:
            print(f"    {what}")
    print(f"p95 of the others: {report.ratio:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second of a tenant")
    parser.add_argument("--tenants", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
        report = uvloop.run(drill(place, seconds=arguments.seconds, rate=arguments.rate, num_tenants=arguments.tenants))
    show(report)
    sys.exit(not report.is_good)


if __name__ == "__main__":
    main()
