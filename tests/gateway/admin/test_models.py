"""Models that share a device in the admin API, over HTTP, in front of a real SQLite store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.tenancy import fleet as rows
from penstock.tenancy.fleet import Lease, ModelOrder, ModelResidency, PoolStatus
from tests.gateway.admin.test_api import Administered, api

__all__ = ["api"]

GIB = 1 << 30
LOADED = ModelResidency(
    "loaded",
    fixed_bytes=5 * GIB,
    floor_bytes=GIB,
    kv_bytes=2 * GIB,
    held_bytes=7 * GIB,
    device="H",
    device_bytes=20 * GIB,
    loaded_at=1000.0,
    min_residence_s=30.0,
)
UNLOADED = ModelResidency(
    "unloaded", fixed_bytes=5 * GIB, floor_bytes=GIB, device="H", device_bytes=20 * GIB, min_residence_s=30.0
)


@dataclass
class Shared:
    api: Administered
    lease: Lease

    def set(self, name: str, residency: ModelResidency | None, **status: Any) -> None:
        with self.api.store.fleet.fenced("f", self.lease) as execute:
            rows.write_pool(execute, PoolStatus(name, time.time(), residency=residency, **status))

    def order(self, name: str, verb: str, body: object = None) -> tuple[int, Any]:
        return self.api.ask("POST", f"/v1/penstock/models/{name}/{verb}", body)

    def stored(self, name: str) -> ModelOrder:
        return self.api.store.fleet.model_orders()[name]


@pytest.fixture
def shared(api: Administered) -> Iterator[Shared]:
    lease = api.store.fleet.take_lease("f", "a", None)
    assert lease is not None
    found = Shared(api, lease)
    found.set("chat", LOADED)
    found.set("code", UNLOADED, start_s=12.0)
    found.set("plain", None)
    yield found
    with api.store.fleet.fenced("f", lease) as execute:
        for table in ("fleet_pools", "model_orders", "fleet_lease"):
            execute(f"DELETE FROM {table}", ())


def test_the_list_has_every_model_with_its_state_and_the_memory_of_the_device(shared: Shared) -> None:
    status, found = shared.api.ask("GET", "/v1/penstock/models")
    assert status == 200
    (device,) = found["devices"]
    assert device == {
        "name": "H",
        "total_bytes": 20 * GIB,
        "held_bytes": 7 * GIB,
        "free_bytes": 13 * GIB,
        "min_residence_s": 30.0,
    }
    chat, code = found["models"]
    assert (chat["name"], chat["state"], chat["stays_until"], chat["eta_s"]) == ("chat", "loaded", 1030.0, None)
    assert chat["memory"] == {
        "fixed_bytes": 5 * GIB,
        "floor_bytes": GIB,
        "kv_bytes": 2 * GIB,
        "held_bytes": 7 * GIB,
    }
    assert (code["name"], code["state"], code["order"]) == ("code", "unloaded", "")


def test_a_load_says_how_long_it_takes_and_the_same_order_again_is_one_order(shared: Shared) -> None:
    status, model = shared.order("code", "load")
    assert (status, model["order"], model["eta_s"]) == (202, "load", 12.0)
    first = shared.stored("code")
    assert (first.wish, first.by) == ("load", "root")
    assert shared.order("code", "load")[0] == 202
    assert shared.stored("code") == first
    shared.set("code", replace(UNLOADED, state="loading"), eta_s=3.5)
    assert shared.api.ask("GET", "/v1/penstock/models/code")[1]["eta_s"] == 3.5


def test_a_model_that_waits_for_its_turn_has_the_wait_in_its_eta(shared: Shared) -> None:
    shared.set("code", replace(UNLOADED, wait_s=20.0), start_s=12.0)
    assert shared.order("code", "load")[1]["eta_s"] == 32.0


def test_what_is_so_already_is_no_order(shared: Shared) -> None:
    assert shared.order("chat", "load")[0] == 200
    assert "chat" not in shared.api.store.fleet.model_orders() or not shared.stored("chat").wish
    assert shared.order("code", "unload")[0] == 200
    assert shared.order("code", "unpin")[0] == 200


@pytest.mark.parametrize("verb", ["load", "warm-up", "pin"])
def test_a_model_that_does_not_fit_is_refused_in_figures(shared: Shared, verb: str) -> None:
    shared.set("code", replace(UNLOADED, fixed_bytes=29 * GIB))
    status, found = shared.order("code", verb)
    assert (status, found["error"]["reason"]) == (409, "no_room")
    assert "30.00 GiB" in found["error"]["message"]
    assert not shared.api.store.fleet.model_orders().get("code", ModelOrder("code")).wish


def test_a_model_is_not_pinned_beside_one_that_was_pinned_a_moment_ago_and_leaves_it_no_room(shared: Shared) -> None:
    shared.set("code", replace(UNLOADED, fixed_bytes=14 * GIB))
    assert shared.order("chat", "pin")[0] == 200
    status, found = shared.order("code", "pin")
    assert (status, found["error"]["reason"]) == (409, "no_room")
    assert "7.00 GiB by chat" in found["error"]["message"]
    chat, code = shared.api.ask("GET", "/v1/penstock/models")[1]["models"]
    assert not chat["no_room"]
    assert "7.00 GiB by chat" in code["no_room"]


def test_a_refusal_of_before_an_order_is_not_told_any_more(shared: Shared) -> None:
    shared.set("code", replace(UNLOADED, wish="unload", refusal="code was unloaded by an operator"))
    assert "operator" in shared.api.ask("GET", "/v1/penstock/models/code")[1]["refusal"]
    assert shared.order("code", "load")[1]["refusal"] == ""


@pytest.mark.parametrize("verb", ["unload", "park"])
def test_streams_refuse_an_order_to_leave_unless_it_drains(shared: Shared, verb: str) -> None:
    shared.set("chat", replace(LOADED, in_flight=2))
    status, found = shared.order("chat", verb)
    assert (status, found["error"]["reason"]) == (409, "busy")
    assert "2 requests are at chat" in found["error"]["message"]
    status, model = shared.order("chat", verb, {"drain": True})
    assert (status, model["order"]) == (202, verb)
    assert shared.order("chat", verb)[0] == 202, "the same order, under way already"


def test_a_pinned_model_does_not_leave_and_is_unpinned_first(shared: Shared) -> None:
    assert shared.order("chat", "pin")[0] == 200
    assert shared.api.ask("GET", "/v1/penstock/models/chat")[1]["stays_until"] is None
    status, found = shared.order("chat", "unload", {"drain": True})
    assert (status, found["error"]["reason"]) == (409, "pinned")
    assert shared.order("chat", "unpin")[1]["pinned"] is False
    assert shared.order("chat", "unload")[0] == 202
    assert shared.order("chat", "pin")[1]["order"] == "", "pinned: the order to leave is over"


def test_what_is_not_loaded_cannot_be_parked(shared: Shared) -> None:
    status, found = shared.order("code", "park")
    assert (status, found["error"]["reason"]) == (409, "not_loaded")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "models/nobody/load", None, 404),
        ("POST", "models/plain/load", None, 409),
        ("POST", "models/chat/launch", None, 404),
        ("POST", "models/chat/unload", {"drain": "yes"}, 422),
        ("POST", "models/chat/unload", {"force": True}, 422),
        ("POST", "models/chat/unload", b"{", 400),
        ("GET", "models/chat/load", None, 405),
        ("DELETE", "models/chat", None, 405),
        ("GET", "models?all=1", None, 422),
        ("GET", "modelsandmore", None, 404),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    shared: Shared, method: str, path: str, body: object, status: int
) -> None:
    before = shared.api.store.fleet.model_orders()
    assert shared.api.ask(method, f"/v1/penstock/{path}", body)[0] == status
    assert shared.api.store.fleet.model_orders() == before


def test_models_are_for_admins(shared: Shared) -> None:
    for method, path in (("GET", "models"), ("POST", "models/code/load")):
        assert shared.api.ask(method, f"/v1/penstock/{path}", key=None)[0] == 401
        assert shared.api.ask(method, f"/v1/penstock/{path}", key="psk_no_admin")[0] == 403
