"""A gateway with two versions of a model and a rollout from one to the other, which tells what it observed."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

from penstock.admission.settings import AdmissionSettings
from penstock.core.rollout import Arm, Metric, RolloutOrder
from penstock.gateway.rollouts.observation import Observation
from penstock.gateway.settings.gateway import ModelSettings
from penstock.gateway.settings.route_board import RouteBoard
from penstock.tenancy.prices import Price
from penstock.tenancy.routes import RouteRevision
from tests.gateway.provider import Provider
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

ORDER = RolloutOrder("r1", "m", "v1", "v2", step=1)
MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]


class Seen:
    """The sink of what is observed."""

    def __init__(self) -> None:
        self.all: list[Observation] = []

    def add(self, seen: Observation) -> None:
        self.all.append(seen)

    def of(self, arm: Arm) -> list[Observation]:
        return [one for one in self.all if one.arm is arm]

    def values(self, arm: Arm, metric: Metric) -> list[float]:
        return [value for one in self.of(arm) for name, value in one.values if name is metric]


@contextlib.contextmanager
def rolling_out(
    one: Provider,
    two: Provider,
    order: RolloutOrder = ORDER,
    *,
    weights: tuple[float, float] = (1.0, 0.0),
    shadow: float = 0.0,
    more: dict[str, ModelSettings] | None = None,
    **options: Any,
) -> Iterator[tuple[RunningGateway, Seen]]:
    """`more`: other models."""
    versions = {
        "v1": {"replicas": [one.url], "weight": weights[0]},
        "v2": {"replicas": [two.url], "weight": weights[1], "shadow": shadow},
    }
    models = {"m": ModelSettings(versions=versions, price=Price(1.0, 2.0), **options), **(more or {})}
    with running_gateway(pools=models, admission=AdmissionSettings()) as gateway:
        seen = Seen()

        def follow() -> None:
            gateway.app.rollouts.sink = seen
            gateway.app.follow([order])

        gateway.call(follow)
        yield gateway, seen
        settle(gateway)


def settle(gateway: RunningGateway) -> None:
    """Nothing is under way any more. It is looked at between two callbacks of the gateway: within one, a copy has ended
    and the next one has not begun."""
    app = gateway.app
    eventually(
        lambda: gateway.call(lambda: (gateway.is_idle(), app.shadows.num_open + app.shadows.num_pairs)),
        lambda found: found == (True, 0),
    )
    eventually(
        lambda: gateway.call(lambda: app.comparisons.num_open),
        lambda found: found == 0,
    )


def change(gateway: RunningGateway, **weights: float) -> None:
    def apply() -> None:
        board = RouteBoard(gateway.app.routes)
        board.changed = gateway.app.use
        board.apply([RouteRevision("m", 1, weights)])

    gateway.call(apply)


def ask(gateway: RunningGateway, *, key: str = "none", stream: bool = False, model: str = "m", **more: Any) -> str:
    found: Any = gateway.client(key).chat.completions.create(
        model=model, stream=stream, messages=MESSAGES, max_tokens=5, **more
    )
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)
    return str(found.choices[0].message.content)


def post(gateway: RunningGateway, path: str, body: object, key: str = "none") -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), json.loads(response.read() or b"null")
