"""Rollouts in the admin API, over HTTP, in front of a real SQLite store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.tenancy.routes import Declared
from tests.gateway.admin.test_api import Administered, api

__all__ = ["api"]

PATH = "/admin/v1/rollouts"
PLAN = {"steps": [{"shadow": 0.1, "min_s": 10}, {"share": 1.0}], "gates": {"tpot": {"margin": 0.2}}, "hold_s": 60}


@pytest.fixture
def chat(api: Administered) -> Iterator[Administered]:
    api.store.routes.declare([Declared("chat", {"v1": 100.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0}, {"tpot_s": 0.05})])
    yield api
    with api.store.rollouts._database.writing() as execute:
        for table in ("rollouts", "rollout_story", "routes", "route_revisions"):
            execute(f"DELETE FROM {table}", ())


def start(chat: Administered, **more: object) -> Any:
    return chat.ask("POST", PATH, {"model": "chat", "to": "v2", **more})


def test_a_rollout_is_started_shown_and_told(chat: Administered) -> None:
    status, begun = start(chat, plan=PLAN)
    assert status == 201
    assert (begun["from"], begun["to"], begun["phase"], begun["step"]) == ("v1", "v2", "waiting", 0)
    assert [step["title"] for step in begun["steps"]][1] == "100 %"
    assert begun["plan"]["gates"]["tpot"]["margin"] == 0.2
    for name in (begun["id"], "chat"):
        status, found = chat.ask("GET", f"{PATH}/{name}")
        assert (status, found["id"]) == (200, begun["id"])
    status, told = chat.ask("GET", f"{PATH}/chat/story")
    assert (status, told["id"], [one["what"] for one in told["story"]]) == (200, begun["id"], ["started"])
    assert [one["id"] for one in chat.ask("GET", f"{PATH}?model=chat")[1]["rollouts"]] == [begun["id"]]
    assert chat.ask("GET", f"{PATH}?model=other") == (200, {"rollouts": []})


def test_a_plan_is_optional_and_follows_from_the_objectives(chat: Administered) -> None:
    gates = start(chat)[1]["plan"]["gates"]
    assert gates["tpot"]["margin"] < gates["output_tokens"]["margin"]  # there is a target for it


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "chta", "to": "v2"}, 404, "model_not_found"),
        ({"model": "chat", "to": "v3"}, 422, "invalid_value"),
        ({"model": "chat", "to": "v2", "from": "v2"}, 422, "invalid_value"),
        ({"model": "chat"}, 422, "invalid_value"),
        ({"model": "chat", "to": "v2", "plan": {"steps": [{"share": 0.5}]}}, 422, "invalid_value"),
        ({"model": "chat", "to": "v2", "plan": {"gates": {"tpto": {}}}}, 422, "invalid_value"),
        ({"model": "chat", "to": "v2", "plan": {"hold": 1}}, 422, "invalid_value"),
    ],
)
def test_what_cannot_be_started_is_refused(chat: Administered, body: object, status: int, code: str) -> None:
    found, answer = chat.ask("POST", PATH, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert chat.store.rollouts.all() == []


def test_orders_are_taken_once_and_an_abort_is_in_force_at_once(chat: Administered) -> None:
    begun = start(chat)[1]
    assert start(chat)[0] == 409
    path = f"{PATH}/{begun['id']}"
    assert chat.ask("POST", f"{path}/pause", {})[1]["ordered"] == "pause"
    assert chat.ask("POST", f"{path}/pause", {})[0] == 202
    assert chat.ask("POST", f"{path}/promote", {"all": True})[1]["ordered"] == "promote"
    assert chat.ask("POST", f"{path}/resume", {"all": True})[0] == 422
    status, aborted = chat.ask("POST", f"{PATH}/chat/abort", {"reason": "it smells"})
    assert (status, aborted["ordered"]) == (202, "abort")
    status, refused = chat.ask("POST", f"{path}/resume", {})
    assert (status, refused["error"]["code"]) == (409, "conflict")


def test_what_is_not_there_is_not_found(chat: Administered) -> None:
    for method, path in (("GET", "nobody"), ("GET", "nobody/story"), ("POST", "nobody/abort")):
        status, answer = chat.ask(method, f"{PATH}/{path}", {} if method == "POST" else None)
        assert (status, answer["error"]["code"]) == (404, "rollout_not_found")
