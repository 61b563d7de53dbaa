"""The time that a standby replica takes to become active: `python -m tools.standby --rounds 100`.

A request is held at a real gateway whose only replica is in standby, another writer commits five times a second as a
controller does, and the replica's row changes. Times are from before that commit until the whole answer is there,
beside those of the same request when the replica is active: what a busy machine adds to every request is in both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import serving
from tests.waiting import eventually

from penstock.tenancy.fleet import PoolStatus, write_pool
from penstock.tenancy.store import open_store

_NAME = "small"
_EVERY_S = 0.2
_BODY = json.dumps({"model": _NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})


@contextlib.contextmanager
def controller_beside(url: str) -> Iterator[None]:
    ended = threading.Event()

    def write() -> None:
        with open_store(url) as store:
            lease = store.fleet.take_lease("beside", "tool", None)
            assert lease is not None
            while not ended.wait(_EVERY_S):
                with store.fleet.fenced("beside", lease) as execute:
                    write_pool(execute, PoolStatus("elsewhere", time.time()))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(gateway: RealGateway, replica: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round."""
    found: dict[str, list[float]] = {"commit": [], "standby to answer": [], "active to answer": []}

    def states() -> list[str]:
        return [one["state"] for one in gateway.ask("GET", "/admin/v1/replicas")[1]["replicas"]]

    def waiting() -> int:
        return int(gateway.ask("GET", "/admin/v1/queues")[1]["queues"][0]["waiting"]["standard"])

    with open_store(gateway.store) as store:
        for number in range(rounds):
            store.replicas.add(_NAME, replica, is_draining=True, state="standby")
            eventually(states, lambda seen: seen == ["standby"])
            with contextlib.closing(gateway.connect()) as connection:
                for name in ("standby to answer", "active to answer"):
                    began_s = time.perf_counter()
                    connection.request("POST", "/v1/chat/completions", _BODY, {"content-type": "application/json"})
                    if name == "standby to answer":
                        eventually(waiting, lambda num: num == 1)
                        time.sleep(number * 0.037 % _EVERY_S)  # at any time between two writes of the other
                        began_s = time.perf_counter()
                        store.replicas.add(_NAME, replica)
                        found["commit"].append(1e3 * (time.perf_counter() - began_s))
                    answer = connection.getresponse()
                    answer.read()
                    assert answer.status == 200
                    found[name].append(1e3 * (time.perf_counter() - began_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        serving() as replica,
        real_gateway(Path(directory), models={_NAME: {"hold_s": 60}}) as gateway,
        controller_beside(gateway.store),
    ):
        found = measure(gateway, f"http://{replica.host}:{replica.port}", arguments.rounds)
    for name, values in found.items():
        cut = quantiles(values, n=20)
        late = sum(value >= 100 for value in values)
        print(f"{name}: median {cut[9]:.0f} ms, p95 {cut[18]:.0f}, most {max(values):.0f}, {late} of 100 ms or more")


if __name__ == "__main__":
    main()
