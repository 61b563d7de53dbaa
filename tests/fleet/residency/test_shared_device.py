"""From replicas to residency and back: what a replica's states mean for its model, and what becomes of the aims."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from penstock.core.residency import Wish
from penstock.core.settings import EngineSettings
from penstock.fleet.policy.decision import ActionKind, Decision
from penstock.fleet.policy.observation import Demand, PoolObservation, ReplicaState, ReplicaView
from penstock.fleet.residency.policy import Rules
from penstock.fleet.residency.shared_device import Seen, SharedDevice, fit_cpu, fit_gpu
from penstock.tenancy.fleet import ModelOrder
from tests.fleet.residency.world import GIB, needs

ACTIVE, DRAINING, PARKED = ReplicaState.ACTIVE, ReplicaState.DRAINING, ReplicaState.PARKED
STANDBY, STARTING, STOPPING, WAKING = (
    ReplicaState.STANDBY,
    ReplicaState.STARTING,
    ReplicaState.STOPPING,
    ReplicaState.WAKING,
)
REPLICA = ReplicaView("r", ACTIVE, 0.0)
A, B = needs("a", 8), needs("b", 8)


class Device:
    """Of two models that do not fit together, and a clock."""

    def __init__(self, **rules: object) -> None:
        self.shared = SharedDevice("H", Rules(12 * GIB, **rules), [A, B], [], fit_cpu)  # type: ignore[arg-type]
        self.orders = {order.model: order for order in self.shared.first_orders()}
        self.replicas: dict[str, ReplicaView | None] = {"a": None, "b": None}
        self.demand = {"a": Demand(), "b": Demand()}
        self.now = 100.0

    def decide(self) -> Mapping[str, Decision]:
        self.now += 1.0
        seen = {
            name: Seen(PoolObservation(name, self.demand[name], () if one is None else (one,)), 0, frozenset())
            for name, one in self.replicas.items()
        }
        found = self.shared.decide(seen, self.orders, self.now)
        for order in self.shared.fulfilled():
            self.orders[order.model] = replace(order, wish=Wish.NONE)
        return found

    def actions(self) -> dict[str, ActionKind]:
        return {name: one.actions[0].kind for name, one in self.decide().items() if one.actions}


@pytest.mark.parametrize(
    ("state", "target", "found"),
    [
        (STARTING, ACTIVE, "loading"),
        (STARTING, STOPPING, "leaving"),
        (STANDBY, ACTIVE, "loading"),
        (STANDBY, STOPPING, "leaving"),
        (STANDBY, STANDBY, "loaded"),
        (ACTIVE, ACTIVE, "loaded"),
        (ACTIVE, PARKED, "draining"),
        (DRAINING, STOPPING, "draining"),
        (DRAINING, ACTIVE, "loaded"),
        (PARKED, PARKED, "parked"),
        (PARKED, ACTIVE, "waking"),
        (WAKING, ACTIVE, "waking"),
        (STOPPING, STOPPING, "leaving"),
    ],
)
def test_states_of_a_replica_are_states_of_its_model(state: ReplicaState, target: ReplicaState, found: str) -> None:
    device = Device()
    device.replicas["a"] = replace(REPLICA, state=state, target=target)
    device.decide()
    assert device.shared.residency("a").state == found


def test_what_fits_is_started_first_and_the_other_by_use_once_its_time_is_over() -> None:
    device = Device(min_residence_s=5.0)
    assert device.actions() == {"a": ActionKind.START}
    assert device.shared.residency("a").held_bytes >= A.least_bytes
    device.replicas["a"] = REPLICA
    assert device.actions() == {}
    assert not device.orders["a"].wish, "the order is done"
    device.demand["b"] = Demand(held=1, oldest_wait_s=1.0)
    assert device.actions() == {}, "it stays for a while"
    device.now += 10
    assert device.actions() == {"a": ActionKind.STOP}
    device.replicas["a"] = None
    assert device.actions() == {"b": ActionKind.START}


def test_a_model_whose_engine_was_lost_is_loaded_again_and_one_that_was_sent_away_is_not() -> None:
    device = Device()
    device.decide()
    device.replicas["a"] = REPLICA
    device.decide()
    device.replicas["a"] = None  # its process ended by itself
    assert device.actions() == {"a": ActionKind.START}
    device.replicas["a"] = REPLICA
    device.decide()
    device.orders["a"] = ModelOrder("a", Wish.UNLOAD)
    assert device.actions() == {"a": ActionKind.STOP}
    device.replicas["a"] = None
    assert device.actions() == {}
    assert "unloaded by an operator" in device.shared.residency("a").refusal


def test_a_gpu_s_engine_gets_all_that_the_plan_gives_it_as_a_share_of_the_card() -> None:
    engine = fit_gpu(80 * GIB, EngineSettings(), A, 12 * GIB)
    assert (engine.memory_fraction, engine.parkable) == (20 / 80, True)
    assert fit_cpu(EngineSettings(), A, 12 * GIB).kv_gib == 12
