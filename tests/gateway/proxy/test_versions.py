"""Versions of a model behind a gateway, with a real client: who is sent where, what is copied, what is counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec
import openai
import pytest

from penstock.admission.settings import AdmissionSettings
from penstock.core.errors import ConfigError
from penstock.gateway.membership.factory import replicas_of
from penstock.gateway.proxy.request_view import read
from penstock.gateway.proxy.shadow import MAX_OPEN
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, pools_of, routes_of
from penstock.gateway.settings.route_board import RouteBoard
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.tenancy.prices import Price
from penstock.tenancy.routes import RouteRevision
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]


def version(provider: Provider, weight: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"replicas": [provider.url], "weight": weight, **more}


@contextlib.contextmanager
def versioned(**versions: dict[str, Any]) -> Iterator[RunningGateway]:
    pools = {"m": ModelSettings(versions=versions, aliases=["default"], price=Price(1.0, 2.0))}
    with running_gateway(pools=pools) as gateway:
        yield gateway
        eventually(gateway.is_idle)
        eventually(lambda: gateway.app.shadows.num_open == 0)


def ask(
    gateway: RunningGateway, model: str = "m", *, stream: bool = False, client: openai.OpenAI | None = None, **more: Any
) -> str:
    found: Any = (client or gateway.openai).chat.completions.create(
        model=model, stream=stream, messages=MESSAGES, max_tokens=5, **more
    )
    if stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in found)
    return str(found.choices[0].message.content)


def change(gateway: RunningGateway, **weights: float) -> None:
    """As a revision does that a gateway hears of."""

    def apply() -> None:
        board = RouteBoard(gateway.app.routes)
        board.changed = gateway.app.use
        board.apply([RouteRevision("m", 1, weights)])

    gateway.call(apply)


def counts(gateway: RunningGateway, name: str, *labels: str) -> float:
    """A sample of the metrics."""
    text = gateway.metrics()
    pairs = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{")]
    return sum(float(value) for head, _, value in pairs if all(label in head for label in labels))


@dataclass
class Heard:
    """A listener of the recorder."""

    ended: Callable[[RequestFacts], None]

    def chose(self, request: EdgeRequest, choice: Choice) -> None: ...


def test_versions_share_by_weight_and_are_counted_apart() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        versioned(v1=version(one, 50), v2=version(two, 50)) as gateway,
    ):
        ended: list[RequestFacts] = []
        gateway.call(lambda: (gateway.app.random.seed(1), gateway.app.recorder.listeners.append(Heard(ended.append))))
        said = [ask(gateway) for _ in range(40)]
        assert said.count("one") == len(one.asked) >= 8
        assert said.count("two") == len(two.asked) >= 8
        assert {asked["model"] for asked in one.asked + two.asked} == {"m"}
        eventually(lambda: len(gateway.ledger.usages) == 40)
        assert {usage.model for usage in gateway.ledger.usages} == {"m@v1", "m@v2"}
        assert counts(gateway, "penstock_gateway_tokens_total", 'model="m@v1"', "input") == 3 * len(one.asked)
        compared: Any = gateway.call(lambda: gateway.app.recorder.versions.since({"v1": "m@v1", "v2": "m@v2"}, 0))
        assert [compared[v]["requests"] for v in ("v1", "v2")] == [len(one.asked), len(two.asked)]
        assert compared["v1"]["tokens"] == {"input": 3 * len(one.asked), "cached": 0, "output": len(one.asked)}
        took_s = [facts.total_s or 0.0 for facts in ended if facts.model == "m@v1"]
        assert compared["v1"]["total_s"]["mean"] == pytest.approx(fmean(took_s), abs=1e-6)
        least_s, most_s = round(0.9 * min(took_s), 6), round(1.1 * max(took_s), 6)  # as what is told is rounded
        assert least_s <= compared["v1"]["total_s"]["p95"] <= most_s


def test_a_session_keeps_its_version_and_a_growing_canary_takes_without_giving_back() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        versioned(v1=version(one, 90), v2=version(two, 10)) as gateway,
    ):
        users = [f"user {number}" for number in range(30)]
        before = {user: ask(gateway, user=user) for user in users}
        assert {user: ask(gateway, user=user, stream=True) for user in users} == before
        change(gateway, v1=60, v2=40)
        after = {user: ask(gateway, user=user) for user in users}
        moved = [user for user in users if after[user] != before[user]]
        assert moved
        assert {after[user] for user in moved} == {"two"}


def test_anthropics_clients_have_sessions_too() -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 5}
    for metadata, session in (({"user_id": "a"}, "a"), ({}, None), ({"user_id": 3}, None), (None, None)):
        assert read(msgspec.json.encode(body | {"metadata": metadata})).session == session


def test_arguments_of_a_chat_template_are_let_through() -> None:
    with providing() as one, versioned(v1=version(one, 1)) as gateway:
        ask(gateway, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert one.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_version_that_fails_can_fall_back_to_another() -> None:
    with providing(says="one") as one, providing(status=500) as two:
        versions = {"v1": version(one, 0), "v2": version(two, 100)}
        with running_gateway(pools={"m": ModelSettings(versions=versions, fallback=["m@v1"])}) as gateway:
            assert ask(gateway) == "one"


def test_one_version_can_be_asked_for_and_an_alias_means_all() -> None:
    with (
        providing(says="one") as one,
        providing(says="two") as two,
        versioned(v1=version(one, 1), v2=version(two)) as gateway,
    ):
        assert [ask(gateway, "m@v2"), ask(gateway, "m@v1"), ask(gateway, "m"), ask(gateway, "default")] == [
            "two",
            "one",
            "one",
            "one",
        ]
        assert [asked["model"] for asked in two.asked] == ["m"]
        assert [model.id for model in gateway.openai.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError):
            ask(gateway, "m@v3")


def test_who_may_use_a_model_may_use_its_versions_and_nobody_else() -> None:
    with providing() as one, providing(says="two") as two, versioned(v1=version(one, 1), v2=version(two)) as gateway:
        key, other = gateway.add_tenant("acme", models=["m"]), gateway.add_tenant("rival", models=["x"])
        assert ask(gateway, "m@v2", client=gateway.client(key)) == "two"
        with pytest.raises(openai.NotFoundError):
            ask(gateway, "m@v2", client=gateway.client(other))


def test_what_is_on_its_way_finishes_where_it_is() -> None:
    with (
        providing(says="one", dawdles=True) as one,
        providing(says="two") as two,
        versioned(v1=version(one, 1), v2=version(two)) as gateway,
        ThreadPoolExecutor(4) as threads,
    ):
        running = [threads.submit(ask, gateway) for _ in range(4)]
        eventually(lambda: len(one.asked) == 4)
        change(gateway, v1=0, v2=100)
        assert [ask(gateway) for _ in range(3)] == ["two"] * 3
        one.may_answer.set()
        assert [one.result() for one in running] == ["one"] * 4


def test_replicas_may_know_a_version_by_another_name() -> None:
    with (
        providing() as one,
        providing() as two,
        versioned(v1=version(one, 1), v2=version(two, served_as="m-2026")) as gateway,
    ):
        ask(gateway, "m@v1"), ask(gateway, "m@v2")
        assert [one.asked[0]["model"], two.asked[0]["model"]] == ["m", "m-2026"]


# -- shadows


@pytest.mark.parametrize("stream", [False, True])
def test_a_shadow_is_sent_what_others_answered_and_changes_nothing(stream: bool) -> None:
    with (
        providing(says="real") as one,
        providing(says="shadow") as two,
        versioned(v1=version(one, 1), v2=version(two, shadow=1.0)) as gateway,
    ):
        assert [ask(gateway, stream=stream) for _ in range(5)] == ["real"] * 5
        eventually(lambda: len(two.asked) == 5)
        assert two.asked == one.asked
        eventually(lambda: counts(gateway, "penstock_gateway_shadow_requests_total", 'outcome="ok"') == 5)
        assert counts(gateway, "penstock_gateway_shadow_tokens_total", 'model="m@v2"', "input") == 15
        eventually(lambda: len(gateway.ledger.usages) == 5)
        assert {usage.model for usage in gateway.ledger.usages} == {"m@v1"}
        assert counts(gateway, "penstock_gateway_requests_total", "m@v2") == 0
        compared: Any = gateway.call(lambda: gateway.app.recorder.versions.since({"v2": "m@v2"}, 0))
        assert compared["v2"]["requests"] == 0
        assert compared["v2"]["shadow"]["requests"] == 5


def test_a_shadow_that_fails_or_dawdles_delays_nobody_and_is_bounded() -> None:
    with (
        providing(says="real") as one,
        providing(status=500) as two,
        versioned(v1=version(one, 1), v2=version(two, shadow=1.0)) as gateway,
    ):
        assert ask(gateway) == "real"
        eventually(lambda: counts(gateway, "penstock_gateway_shadow_requests_total", 'outcome="failed"') == 1)
        two.status = 200
        two.may_answer.clear()  # until the end: nobody waits for it
        assert [ask(gateway) for _ in range(MAX_OPEN + 6)] == ["real"] * (MAX_OPEN + 6)
        eventually(lambda: counts(gateway, "penstock_gateway_shadow_requests_total", 'outcome="dropped"') == 6)
        assert gateway.app.shadows.num_open == MAX_OPEN
        gateway.call(gateway.app.shadows.close)


def test_a_share_of_the_traffic_is_copied() -> None:
    with providing() as one, providing() as two, versioned(v1=version(one, 1), v2=version(two, shadow=0.3)) as gateway:
        gateway.call(lambda: gateway.app.random.seed(1))
        for _ in range(60):
            ask(gateway)
        eventually(lambda: (gateway.is_idle(), gateway.app.shadows.num_open), lambda seen: seen == (True, 0))
        assert 5 <= len(two.asked) <= 32


def test_copies_are_cut_off_when_a_request_has_to_wait(replica_at_hand: Replica) -> None:
    replica = replica_at_hand
    with providing(says="real") as one:
        url = f"http://{replica.host}:{replica.port}"
        versions = {"v1": version(one, 1), "v2": {"replicas": [url], "shadow": 1.0}}
        pools = {NAME: ModelSettings(versions=versions)}
        with running_gateway(pools=pools, admission=AdmissionSettings()) as gateway:
            with replica.engine_paused():  # no copy comes to its end
                for number in range(3):
                    found = gateway.openai.chat.completions.create(
                        model=NAME, messages=MESSAGES, max_tokens=400 + number, stream=True
                    )
                    assert [chunk.choices[0].delta.content for chunk in found if chunk.choices]
                eventually(lambda: gateway.app.shadows.num_open > 0)
                gateway.call(lambda: gateway.app.shadows.give_way(f"{NAME}@v2"))
                assert gateway.app.shadows.num_open == 0
                assert counts(gateway, "penstock_gateway_shadow_requests_total", 'outcome="cut_off"') >= 1
            eventually(lambda: replica.metrics()["penstock_requests_open"] == 0)


def test_a_copy_to_a_penstock_replica_counts_the_tokens_of_a_stream(replica_at_hand: Replica) -> None:
    replica = replica_at_hand
    with providing(says="real") as one:
        url = f"http://{replica.host}:{replica.port}"
        versions = {"v1": version(one, 1), "v2": {"replicas": [url], "shadow": 1.0}}
        with running_gateway(pools={NAME: ModelSettings(versions=versions)}) as gateway:
            list(gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=7, stream=True))
            eventually(lambda: counts(gateway, "penstock_gateway_shadow_requests_total", 'outcome="ok"') == 1)
            assert 1 <= counts(gateway, "penstock_gateway_shadow_tokens_total", "output") <= 7
            assert counts(gateway, "penstock_gateway_shadow_tokens_total", "input") > 3


# -- settings


def test_every_version_is_a_pool_with_the_models_settings_and_its_own() -> None:
    settings = GatewaySettings(
        models={
            "m": {
                "price": {"input": 1.0},
                "probe_every_s": 7,
                "versions": {
                    "v1": {"replicas": ["http://a"], "weight": 90},
                    "v2": {"replicas": ["http://b"], "weight": 10, "shadow": 0.05, "price": {"input": 2.0}},
                },
            }
        }
    )
    models = settings.pools()
    pools = pools_of(models)
    assert {name: (pool.price.input, pool.probe_every_s) for name, pool in pools.items()} == {
        "m@v1": (1.0, 7),
        "m@v2": (2.0, 7),
    }
    assert {replica.model: (replica.id, replica.served_as) for replica in replicas_of(models)} == {
        "m@v1": ("http://a", "m"),
        "m@v2": ("http://b", "m"),
    }
    board = RouteBoard(routes_of(models))
    (declared,) = board.declared()
    assert (declared.weights, declared.shadow) == ({"v1": 90, "v2": 10}, {"v1": 0, "v2": 0.05})


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"versions": {"v1": {"replicas": ["http://a"]}}}, "has a weight"),
        ({"versions": {"v1": {"replicas": ["http://a"], "weight": -1}}}, "weight"),
        ({"versions": {"v 1": {"weight": 1}}}, "letters"),
        ({"versions": {"v1": {"replicas": ["http://a"], "wieght": 1}}}, "did you mean|has a weight"),
        ({"versions": {"v1": {"replicas": ["http://a"], "weight": 1, "aliases": ["x"]}}}, "not of one version"),
        ({"versions": {"v1": {"replicas": ["http://a"], "weight": 1}}, "replicas": ["http://b"]}, "of none"),
    ],
)
def test_versions_that_make_no_sense_are_refused(model: dict[str, Any], complaint: str) -> None:
    models = GatewaySettings(models={"m": model}).pools()
    with pytest.raises(ConfigError, match=complaint):
        (routes_of if "weight" in complaint or "letters" in complaint else replicas_of)(models)
