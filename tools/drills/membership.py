"""Time until every gateway of a store knows a replica that was added, and has dropped one that was removed.

    python -m tools.drills.membership [--gateways 2] [--rounds 20]

Real gateways and replicas. A round adds a replica to the store, waits until each gateway lists it and finds it ready,
and removes it again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic

from tools.drills.stand import MODEL, Process, stand

from penstock.tenancy.store import open_store

_GIVE_UP_S = 60.0


def states(gateway: Process) -> dict[str, str]:
    return {one["id"]: one["state"] for one in gateway.get("/admin/v1/replicas")["replicas"]}


def until(is_so: Callable[[], bool]) -> float:
    """Seconds that it took."""
    began = monotonic()
    while not is_so():
        if monotonic() - began > _GIVE_UP_S:
            raise TimeoutError("a gateway never heard of it")
    return monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    times_s: dict[str, list[float]] = {"added": [], "ready": [], "removed": []}
    with tempfile.TemporaryDirectory() as directory, stand(Path(directory)) as place:
        first, second = place.replica(), place.replica()
        gateways = [place.gateway(first) for _ in range(arguments.gateways)]
        with open_store(place.store) as store:
            for _ in range(arguments.rounds):
                store.replicas.add(MODEL, second.url)
                added_s = until(lambda: all(second.url in states(one) for one in gateways))
                times_s["added"].append(added_s)
                ready_s = until(lambda: all(states(one)[second.url] == "ready" for one in gateways))
                times_s["ready"].append(added_s + ready_s)
                store.replicas.remove(second.url)
                times_s["removed"].append(until(lambda: all(second.url not in states(one) for one in gateways)))
    for what, found in times_s.items():
        print(f"{what:8} median {1e3 * median(found):5.0f} ms, most {1e3 * max(found):5.0f} ms")


if __name__ == "__main__":
    main()
