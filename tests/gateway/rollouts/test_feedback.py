"""Users' feedback through a gateway, to the store and back to the version that answered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.rollout import Arm, Cell, CellKey, Metric
from penstock.gateway.rollouts.board import RolloutBoard
from penstock.gateway.rollouts.writer import RolloutWriter
from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.rollouts import Rollout, new_rollout
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store, open_store
from tests.gateway.provider import Provider, providing
from tests.gateway.rollouts.measuring import MESSAGES, post
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

PATH = "/v1/penstock/feedback"


@contextlib.contextmanager
def following(store: Store, rollout: Rollout, one: Provider, two: Provider) -> Iterator[RunningGateway]:
    """A gateway that measures a rollout for a store, as `penstock gateway` puts it together."""
    versions = {"v1": {"replicas": [one.url], "weight": 1}, "v2": {"replicas": [two.url], "weight": 0}}
    with running_gateway(pools={"m": ModelSettings(versions=versions)}) as gateway:
        writer, board = RolloutWriter(store.rollouts, "g", gateway.app.clock), RolloutBoard()

        def begin() -> None:
            writer.start()
            board.apply([rollout.order])
            board.follow(gateway.app, writer)

        gateway.call(begin)
        try:
            yield gateway
        finally:
            eventually(gateway.is_idle)
            gateway.call(writer.close)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.db") as found:
        found.routes.declare([Declared("m", {"v1": 1.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        yield found


def asked(gateway: RunningGateway, key: str) -> str:
    """The id of a request that was answered."""
    status, headers, _ = post(gateway, "/v1/chat/completions", {"model": "m", "messages": MESSAGES}, key)
    assert status == 200
    return headers["x-request-id"]


def test_a_users_word_reaches_the_version_that_answered_its_tenant(store: Store) -> None:
    rollout = store.rollouts.start(new_rollout("m", "v1", "v2"))
    with providing() as one, providing() as two, following(store, rollout, one, two) as gateway:
        acme, rival = gateway.add_tenant("acme"), gateway.add_tenant("rival")
        request_id = asked(gateway, acme)
        body = {"request_id": request_id, "score": "bad", "comment": "wrong city"}
        assert post(gateway, PATH, body, rival)[0] == 202  # it tells nobody whether there is such a request
        assert post(gateway, PATH, body, acme)[0] == 202
        assert post(gateway, PATH, {"request_id": asked(gateway, acme), "score": 0.5}, acme)[0] == 202
        eventually(lambda: len(store.rollouts.feedback_since(0)), lambda found: found == 3)
    cells: dict[CellKey, Cell] = {}
    for block in store.rollouts.blocks(rollout.id)[1]:
        for key, cell in block.cells:
            cells.setdefault(key, Cell()).merge(cell)
    assert cells[CellKey(Metric.COMPLAINTS, Arm.OLD)] == Cell(2, 1.25, 1.0625)
    assert cells[CellKey(Metric.ERRORS, Arm.OLD)].count == 2
    words = {(one.tenant, one.score, one.comment) for one in store.rollouts.feedback_since(0)}
    assert words == {("rival", 0.0, "wrong city"), ("acme", 0.0, "wrong city"), ("acme", 0.75, "")}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b"x" * (17 << 10), 413, "body_too_large"),
        ({"score": 1}, 422, "invalid_value"),
        ({"request_id": "a"}, 422, "invalid_value"),
        ({"request_id": "a", "score": 2}, 422, "invalid_value"),
        ({"request_id": "a", "score": "fine"}, 422, "invalid_value"),
        ({"request_id": "a\nb", "score": 1}, 422, "invalid_value"),
        ({"request_id": "a" * 201, "score": 1}, 422, "invalid_value"),
        ({"request_id": "a", "score": 1, "comment": "x" * 2001}, 422, "invalid_value"),
        ({"request_id": "a", "score": 1, "comment": "x\0y"}, 422, "invalid_value"),
        ({"request_id": "a", "score": 1, "tenant": "rival"}, 422, "invalid_value"),
    ],
)
def test_feedback_that_makes_no_sense_is_refused(gateway: RunningGateway, body: Any, status: int, code: str) -> None:
    found, _, said = post(gateway, PATH, body, KEYS["plain"])
    assert (found, said["error"]["code"]) == (status, code)


def test_feedback_needs_a_key_and_a_post(gateway: RunningGateway) -> None:
    assert post(gateway, PATH, {"request_id": "a", "score": 1}, "nobody's")[0] == 401
    with pytest.raises(Exception, match="takes POST"):
        gateway.client(KEYS["plain"]).get("/penstock/feedback", cast_to=object)


def test_feedback_is_a_request_of_its_tenants_limits(gateway: RunningGateway) -> None:
    found = [post(gateway, PATH, {"request_id": "a", "score": 1}, KEYS["limited"])[0] for _ in range(3)]
    assert found == [202, 202, 429]


KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db") as found:
        found.routes.declare([Declared("m", {"v1": 1.0, "v2": 0.0}, {"v1": 0.0, "v2": 0.0})])
        rollout = found.rollouts.start(new_rollout("m", "v1", "v2"))
        with providing() as one, providing() as two, following(found, rollout, one, two) as running:
            KEYS["plain"] = running.add_tenant("plain")
            KEYS["limited"] = running.add_tenant("limited", limits={"requests_per_minute": 2})
            yield running
