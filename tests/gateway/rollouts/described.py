"""The modules of a gateway in a process of their own, which prints the classes that msgspec describes once they are
imported, while everything that a store has for a gateway is read."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

described: list[str] = []


def hook() -> None:
    """msgspec asks these for the annotations of each class that it describes; it looks them up once, at its import."""
    (place,) = importlib.util.find_spec("msgspec").submodule_search_locations  # type: ignore[union-attr, misc]
    spec = importlib.util.spec_from_file_location("msgspec._utils", Path(place, "_utils.py"))
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("get_class_annotations", "get_dataclass_info", "get_typeddict_info"):
        setattr(module, name, partial(_noting, getattr(module, name)))
    sys.modules["msgspec._utils"] = module


def _noting(real: Callable[[object], object], of: object) -> object:
    described.append(str(of))
    return real(of)


def read_all(directory: Path) -> None:
    import msgspec

    import penstock.cli.gateway_process
    import penstock.rollout.elected  # noqa: F401
    from penstock.core.rollout import Block
    from penstock.rollout.desk import find, rollout_document, start_rollout, story_of
    from penstock.rollout.runner import gates_of, state_of
    from penstock.tenancy.fleet import FleetReplica, FleetSample, PoolDemand, PoolStatus
    from penstock.tenancy.rollouts import RolloutVerb
    from penstock.tenancy.routes import Declared, shares_asked
    from penstock.tenancy.store import open_store

    assert len(described) > 50, "the hook has no effect"
    described.clear()
    with open_store(f"sqlite:///{directory / 'penstock.db'}") as store:
        store.add_tenant({"id": "acme", "name": "Acme"})
        store.create_key("acme")
        store.admins.add("ann")
        store.replicas.add("chat", "http://127.0.0.1:1")
        store.routes.declare([Declared("chat", {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        store.routes.change("chat", shares_asked({"weights": {"v1": 90.0}}))
        plan = {"steps": [{"share": 1.0, "max_s": 900}], "gates": {"ttft": {"margin": 0.1}}}
        rollout = start_rollout(store, "chat", "v2", plan=plan)
        store.rollouts.give(rollout.id, RolloutVerb.PAUSE, by="ann")
        store.rollouts.write_blocks([Block(rollout.id, 0, "gateway", 0.0, 10.0, [])])
        store.fleet.write_demand([PoolDemand("gateway", "chat", 0.0)])
        lease = store.fleet.take_lease("fleet", "controller", None)
        assert lease is not None
        with store.fleet.fenced("fleet", lease) as execute:
            store.fleet.claim_pool(execute, PoolStatus("chat", 0.0))
            row = msgspec.json.encode(FleetReplica("r", "chat", "active", 0.0)).decode()
            execute("INSERT INTO fleet_replicas (id, pool, document) VALUES (?, ?, ?)", ("r", "chat", row))
            row = msgspec.json.encode(FleetSample(1.0, "chat")).decode()
            execute("INSERT INTO fleet_history (at, pool, document) VALUES (?, ?, ?)", (1.0, "chat", row))
        found = find(store.rollouts, "chat")
        assert state_of(found).new == "v2"
        assert gates_of(found) == []
        assert story_of(store.rollouts, found.id)
        assert rollout_document(found)
        assert store.rollouts.blocks(found.id)[1]
        assert store.changes().rollouts
        assert store.routes.history("chat")
        for rows in (store.tenants(), store.keys(), store.admins.all(), store.replicas.all(), store.rollouts.orders()):
            assert len(rows) == 1
        assert store.fleet.write_demand([PoolDemand("gateway", "chat", 1.0)])
        assert len(store.fleet.replicas()) == len(store.fleet.history()) == 1
    print(*described, sep="\n")


if __name__ == "__main__":
    hook()
    read_all(Path(sys.argv[1]))
