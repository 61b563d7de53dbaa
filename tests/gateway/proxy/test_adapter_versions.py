"""Adapters of one model as versions of a route: on the same replicas, and told apart by all that is kept of them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.core.rollout import Arm, Metric, RolloutOrder
from penstock.core.settings import ServerSettings
from penstock.gateway.records.decision_log import DecisionLog
from penstock.gateway.records.decisions import read_decisions
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.settings.gateway import ModelSettings
from penstock.gateway.settings.route_board import RouteBoard
from penstock.tenancy.routes import RouteRevision
from tests.gateway.proxy.test_versions import Heard, counts
from tests.gateway.rollouts.measuring import Seen, settle
from tests.gateway.running import RunningGateway, running_gateway
from tests.model.lora import write_adapter
from tests.server.replica import NAME, Replica, serving
from tests.server.test_lora import CONFIG
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OLD, NEW = "october", "november"


@contextlib.contextmanager
def support(
    directory: Path, versions: dict[str, Any], recorder: GatewayRecorder | None = None
) -> Iterator[tuple[RunningGateway, list[Replica]]]:
    """Two replicas with both adapters, behind a gateway whose route `support` has these versions."""
    paths: dict[str, str | None] = {
        name: str(write_adapter(directory / name, CONFIG, seed=seed)) for seed, name in enumerate((OLD, NEW))
    }
    with contextlib.ExitStack() as stack:
        settings = [ServerSettings(adapter_file=str(directory / f"{place}.json")) for place in range(2)]
        replicas = [stack.enter_context(serving(each, max_loras=2, step_s=0.01)) for each in settings]
        urls = [f"http://{replica.host}:{replica.port}" for replica in replicas]
        models = {
            NAME: ModelSettings(replicas=urls, adapters=paths),
            "support": ModelSettings(versions=versions),
        }
        gateway = stack.enter_context(running_gateway(pools=models, recorder=recorder))
        eventually(lambda: all(each.snapshot.adapters >= {OLD, NEW} for each in gateway.app.replicas.values()))
        yield gateway, replicas


def say(client: openai.OpenAI, model: str = "support", prompt: str = "one two", **more: Any) -> str:
    return client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0, **more).choices[0].text


def test_adapters_share_a_route_are_copied_to_promoted_and_told_apart(tmp_path: Path) -> None:
    split = {"v1": {"adapter": OLD, "weight": 50}, "v2": {"adapter": NEW, "weight": 50}, "v3": {"model": NAME}}
    with (
        DecisionLog(tmp_path / "d") as log,
        support(tmp_path, split, GatewayRecorder(decisions=log)) as (gateway, all_),
    ):
        board = RouteBoard(gateway.app.routes)
        board.changed = gateway.app.use
        ended: list[RequestFacts] = []
        gateway.call(lambda: gateway.app.recorder.listeners.append(Heard(ended.append)))
        expected = {name: all_[0].adapted_answer("one two", 6, name) for name in (OLD, NEW)}
        plain = all_[0].answer("one two", 6)
        assert len({*expected.values(), plain}) == 3

        asked = Counter[str]()  # by the name that was asked for

        def ask(model: str = "support", **more: Any) -> str:
            asked[model] += 1
            return say(gateway.openai, model, **more)

        users = [f"user {number}" for number in range(8)]
        said = {user: ask(user=user) for user in users}
        assert set(said.values()) == set(expected.values())
        assert {user: ask(user=user) for user in users} == said
        assert [ask(f"support@v{number}") for number in (1, 2, 3)] == [expected[OLD], expected[NEW], plain]

        gateway.call(lambda: board.apply([RouteRevision("support", 1, {"v1": 100.0, "v2": 0.0}, {"v2": 1.0})]))
        assert {ask(user=user) for user in users} == {expected[OLD]}
        copied = 'model="support@v2",outcome="ok"'

        def has_copy() -> bool:
            """A replica whose last report has something waiting gets none."""
            assert ask() == expected[OLD]
            settle(gateway)
            return counts(gateway, "penstock_gateway_shadow_requests_total", copied) > 0

        eventually(has_copy)
        gateway.call(lambda: board.apply([RouteRevision("support", 2, {"v1": 0.0, "v2": 100.0}, {"v2": 0.0})]))
        assert ask() == expected[NEW]
        gateway.call(lambda: board.apply([RouteRevision("support", 3, {"v1": 100.0, "v2": 0.0})]))
        assert ask() == expected[OLD]

        eventually(lambda: len(ended) == asked.total())
        pools = {(facts.model, facts.version) for facts in ended}
        assert pools == {(NAME, f"support@v{number}") for number in (1, 2, 3)}
        eventually(lambda: len(gateway.ledger.usages) == asked.total())
        assert {usage.model for usage in gateway.ledger.usages} == {f"support@v{number}" for number in (1, 2, 3)}
        assert counts(gateway, "penstock_gateway_requests_total", 'model="support@v3"') == 1
        assert counts(gateway, "penstock_gateway_requests_total", f'model="{NAME}"') == 0
        names = {f"v{number}": f"support@v{number}" for number in (1, 2, 3)}
        compared: Any = gateway.call(lambda: gateway.app.recorder.versions.since(names, 0))
        assert sum(one["requests"] for one in compared.values()) == asked.total()
        assert compared["v3"]["requests"] == 1
        assert compared["v2"]["shadow"]["outcomes"]["ok"] > 0
    decided = [one for request in read_decisions(tmp_path / "d") for one in request.decisions]
    assert {(one.model, one.route, one.version) for one in decided} >= {
        (NAME, "support", "v1"),
        (NAME, "support", "v2"),
    }


def test_a_rollout_between_adapters_measures_answers_and_pairs_of_copies(tmp_path: Path) -> None:
    split = {"v1": {"adapter": OLD, "weight": 1}, "v2": {"adapter": NEW, "shadow": 1.0}}
    with support(tmp_path, split) as (gateway, replicas):
        seen = Seen()

        def follow() -> None:
            gateway.app.rollouts.sink = seen
            gateway.app.follow([RolloutOrder("r", "support", "v1", "v2", step=1)])

        gateway.call(follow)
        say(gateway.openai, NAME), say(gateway.openai, "support@v2")  # no sample of either version's traffic
        settle(gateway)
        assert seen.all == []

        def has_pair() -> bool:
            """A replica whose last report has something waiting gets no copy."""
            assert say(gateway.openai) == replicas[0].adapted_answer("one two", 6, OLD)
            settle(gateway)
            return bool(seen.of(Arm.PAIR))

        eventually(has_pair)
        assert seen.values(Arm.OLD, Metric.ERRORS)
        for arm, differs in ((Arm.OLD_COPY, False), (Arm.NEW_COPY, True)):
            assert set(seen.values(arm, Metric.ERRORS)) == {0.0}
            assert {bool(one) for one in seen.values(arm, Metric.DISAGREEMENT)} == {differs}
        assert not seen.of(Arm.NEW)


def test_a_stream_that_is_moved_keeps_its_version_and_tenants_need_the_routes_name(tmp_path: Path) -> None:
    split = {"v1": {"adapter": OLD, "weight": 1}, "v2": {"adapter": NEW}}
    with support(tmp_path, split) as (gateway, replicas):
        reader = gateway.client(gateway.add_tenant("reader", adapters=["support"]))
        by_names = gateway.client(gateway.add_tenant("by-names", adapters=[OLD, NEW]))
        barred = gateway.client(gateway.add_tenant("barred", models=["support"], adapters=["*"]))
        assert [card.id for card in reader.models.list().data] == [NAME, "support"]
        assert reader.models.retrieve("support").to_dict()["parent"] == NAME
        for client in (by_names, barred, gateway.client(gateway.add_tenant("plain"))):
            for name in ("support", "support@v2"):
                with pytest.raises(openai.NotFoundError, match=f"no model '{name}'"):
                    say(client, name)
        with pytest.raises(openai.NotFoundError):
            say(reader, OLD)

        stream = reader.completions.create(
            model="support@v2",
            prompt="one two",
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        whole = replicas[0].adapted_answer("one two", 200, NEW, ignore_eos=True)
        chunks = [next(stream)]
        busy = next(replica for replica in replicas if replica.engine.num_open)
        busy.kill_engine()
        assert "".join(chunk.choices[0].text for chunk in [*chunks, *stream]) == whole
        eventually(lambda: {usage.model for usage in gateway.ledger.usages} == {"support@v2"})
