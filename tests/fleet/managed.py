"""A store that a controller writes to: pools whose status is always fresh, without replicas behind them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import msgspec

from penstock.fleet.policy.decision import Decision
from penstock.tenancy.fleet import (
    FleetReplica,
    FleetSample,
    PoolStatus,
    write_decision,
    write_pool,
    write_replica,
    write_sample,
)
from penstock.tenancy.store import open_store
from tests.waiting import GIVE_UP_S

_EVERY_S = 0.5


@contextlib.contextmanager
def managed(
    url: str,
    *statuses: PoolStatus,
    replicas: tuple[FleetReplica, ...] = (),
    samples: tuple[FleetSample, ...] = (),
    decisions: tuple[Decision, ...] = (),
) -> Iterator[None]:
    """The statuses are written over and over as long as it lasts, the rest once."""
    ended, begun = threading.Event(), threading.Event()

    def write() -> None:
        with open_store(url) as store:
            lease = store.fleet.take_lease("fleet", "test", store.fleet.lease("fleet"))
            assert lease is not None
            with store.fleet.fenced("fleet", lease) as execute:
                for replica in replicas:
                    write_replica(execute, replica)
                for sample in samples:
                    write_sample(execute, sample)
                for decision in decisions:
                    write_decision(execute, decision.at, decision.pool, decision)
            while True:
                with store.fleet.fenced("fleet", lease) as execute:
                    for status in statuses:
                        write_pool(execute, msgspec.structs.replace(status, at=time.time()))
                begun.set()
                if ended.wait(_EVERY_S):
                    return

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(GIVE_UP_S)
    try:
        yield
    finally:
        ended.set()
        thread.join()
