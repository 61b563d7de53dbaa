"""Scale to zero at a real gateway: a model that only a controller knows is listed, held for and served."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.tenancy.fleet import Lease, PoolStatus, write_pool
from penstock.tenancy.store import Store, open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow

FLEET = "f"


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving() as found:
        yield found


class Controller:
    """The part of one that gateways see."""

    def __init__(self, store: Store) -> None:
        self.store = store
        lease = store.fleet.take_lease(FLEET, "test", None)
        assert lease is not None
        self._lease: Lease = lease

    def say(self, eta_s: float, age_s: float = 0.0) -> None:
        status = PoolStatus(NAME, time.time() - age_s, eta_s=eta_s, start_s=20.0, hold_s=60.0)
        with self.store.fleet.fenced(FLEET, self._lease) as execute:
            write_pool(execute, status)

    @property
    def num_held(self) -> int:
        return sum(row.held for row in self.store.fleet.demand() if row.pool == NAME)


@contextlib.contextmanager
def at_zero(directory: Path, eta_s: float) -> Iterator[tuple[RealGateway, Controller]]:
    """A gateway without models, and a controller that has one of which no replica runs."""
    with real_gateway(directory, models={}) as gateway, open_store(gateway.store) as store:
        controller = Controller(store)
        assert listed(gateway) == []
        controller.say(eta_s)
        eventually(lambda: listed(gateway), lambda models: models == [NAME])
        yield gateway, controller


def listed(gateway: RealGateway) -> list[str]:
    return [card["id"] for card in gateway.ask("GET", "/v1/models")[1]["data"]]


def chat(*, stream: bool) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": stream}


def test_a_model_without_replicas_exists_and_its_requests_wait_for_one(tmp_path: Path, replica: Replica) -> None:
    with at_zero(tmp_path, eta_s=20.0) as (gateway, controller):
        assert gateway.ask("GET", "/ready")[0] == 200
        stream, whole = gateway.connect(), gateway.connect()
        for connection, is_stream in ((stream, True), (whole, False)):
            body = json.dumps(chat(stream=is_stream))
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        eventually(lambda: controller.num_held, lambda num: num == 2)
        answer = stream.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert answer.readline().startswith(b": waiting for a replica, ready in about ")
        metrics = gateway.ask("GET", "/metrics", url=gateway.admin_url)[1]
        assert f'penstock_gateway_held_requests{{model="{NAME}"}} 2'.encode() in metrics
        controller.store.replicas.add(NAME, f"http://{replica.host}:{replica.port}")
        assert b"data: [DONE]" in answer.read()
        assert whole.getresponse().status == 200
        eventually(lambda: controller.num_held, lambda num: num == 0)
        for connection in (stream, whole):
            connection.close()


def test_a_wait_that_is_too_long_is_refused_with_the_time_and_a_silent_controller_is_none(tmp_path: Path) -> None:
    with at_zero(tmp_path, eta_s=1000.0) as (gateway, controller), contextlib.closing(gateway.connect()) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(chat(stream=True)))
        answer = connection.getresponse()
        message = json.loads(answer.read())["error"]["message"]
        assert (answer.status, "one is expected in about" in message) == (503, True)
        assert 60 < int(answer.headers["retry-after"]) <= 1000
        controller.say(1000.0, age_s=60.0)
    with real_gateway(tmp_path, models={}) as gateway:  # a gateway that starts while the controller is silent
        assert listed(gateway) == [NAME]
        status, answer = gateway.ask("POST", "/v1/chat/completions", chat(stream=True))
        assert (status, answer["error"]["message"]) == (503, "no replica of this model is ready")
        assert gateway.ask("GET", "/ready")[0] == 503
