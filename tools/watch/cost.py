"""The cost of the watch: `python -m tools.watch.cost`."""

from __future__ import annotations

import time
import tracemalloc
from typing import NamedTuple

from penstock.core.slo import Slo
from penstock.watch.readings import FleetReading, ReplicaReading
from penstock.watch.watch import Watch

_MODELS, _REPLICAS, _TICKS = 100, 4, 300


class _Ended(NamedTuple):
    model: str
    replica: str = "r0"
    ending: str = "ok"
    input_tokens: int = 500
    cached_tokens: int = 250
    output_tokens: int = 100
    ttft_s: float | None = 0.2
    total_s: float | None = 2.2


def main() -> None:
    names = [f"m{number}" for number in range(_MODELS)]
    watch = Watch({name: Slo() for name in names}, 0.0)
    requests = [_Ended(name, f"{name}-{number}") for name in names for number in range(_REPLICAS)]
    began_s = time.process_time()
    for _ in range(100):
        for request in requests:
            watch.ended(request)
    print(f"a request: {(time.process_time() - began_s) / (100 * len(requests)) * 1e6:.1f} µs")
    replicas = [ReplicaReading(model=one.model, replica=one.replica, is_usable=True, boot="b") for one in requests]
    fleet, times = FleetReading(replicas, dict.fromkeys(names, 0)), []
    for second in range(1, _TICKS + 1):
        began_s = time.process_time()
        watch.tick(fleet, float(second), float(second))
        times.append(time.process_time() - began_s)
    middle, worst = sorted(times)[_TICKS // 2], max(times)
    print(f"a tick of {_MODELS} models with {_REPLICAS} replicas: {middle * 1e3:.1f} ms, at worst {worst * 1e3:.1f} ms")
    tracemalloc.start()
    one = Watch({"m": Slo()}, 0.0)
    for minute in range(31 * 1440):
        one.ended(_Ended("m"))
        one.tick(FleetReading(), 60.0 * minute, 60.0 * minute)
    print(f"a model after a month: {tracemalloc.get_traced_memory()[0] / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
