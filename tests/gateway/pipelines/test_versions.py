"""Pipelines as versions of a model: who gets which, what is measured of each, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.core.rollout import Arm, Metric, RolloutOrder
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.request_log import RequestLog
from penstock.gateway.settings.gateway import ModelSettings
from penstock.gateway.settings.route_board import RouteBoard
from penstock.tenancy.routes import RouteRevision
from tests.gateway.pipelines.written import written
from tests.gateway.provider import Provider, providing
from tests.gateway.proxy.test_versions import Heard
from tests.gateway.rollouts.measuring import Seen
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "Why?"}]
SPLIT: dict[str, Any] = {"v1": {"pipeline": "old", "weight": 1}, "v2": {"pipeline": "new"}}


def pipelines(directory: Path) -> list[Any]:
    """The steps of `new` ask the model twice."""
    old = 'name: old\nsteps:\n  answer: {model: small, prompt: "{{ input.text }}"}\n'
    new = old.replace("old", "new").replace("steps:\n", 'steps:\n  first: {model: small, prompt: "1"}\n')
    for name in ("old", "new"):
        (directory / name).mkdir()
    return [written(directory / "old", old), written(directory / "new", new)]


def serving(directory: Path, provider: Provider, versions: dict[str, Any], **options: Any) -> Any:
    models = {
        "small": ModelSettings(replicas=[provider.url], dialect="openai"),
        "triage": ModelSettings(versions=versions),
    }
    return running_gateway(pools=models, pipelines=pipelines(directory), **options)


def ask(gateway: RunningGateway, model: str = "triage", key: str = "none", **more: Any) -> Any:
    return gateway.client(key).chat.completions.create(model=model, messages=MESSAGES, **more)


def test_a_pipeline_is_promoted_and_each_is_measured_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.gateway.request")
    with (
        RequestLog() as log,
        providing() as provider,
        serving(tmp_path, provider, SPLIT, recorder=GatewayRecorder(log)) as gateway,
    ):
        ended: list[RequestFacts] = []
        gateway.call(lambda: gateway.app.recorder.listeners.append(Heard(ended.append)))
        assert [ask(gateway).model, ask(gateway, "triage@v2").model] == ["triage", "triage@v2"]
        assert len(provider.asked) == 3

        def promote() -> None:
            board = RouteBoard(gateway.app.routes)
            board.changed = gateway.app.use
            board.apply([RouteRevision("triage", 1, {"v1": 0.0, "v2": 100.0})])

        gateway.call(promote)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(gateway, stream=True))
        assert len(provider.asked) == 5
        eventually(lambda: sum(not facts.step_of for facts in ended) == 3)
        wholes = [(facts.route, facts.model, facts.version) for facts in ended if not facts.step_of]
        assert wholes == [
            ("triage", "old", "triage@v1"),
            ("triage@v2", "new", "triage@v2"),
            ("triage", "new", "triage@v2"),
        ]
        assert {facts.version for facts in ended if facts.step_of} == {""}
        assert [usage.model for usage in gateway.ledger.usages if usage.requests] == [
            "triage@v1",
            "triage@v2",
            "triage@v2",
        ]
        assert 'requests_total{model="triage@v2"' in gateway.metrics()
        versions = {"v1": "triage@v1", "v2": "triage@v2"}
        compared: Any = gateway.call(lambda: gateway.app.recorder.versions.since(versions, 0))
        assert [(one["requests"], one["ttft_s"]["mean"] is None) for one in compared.values()] == [
            (1, True),
            (2, False),
        ]
        assert compared["v2"]["tokens"]["input"] > compared["v1"]["tokens"]["input"] > 0
    lines = [line for line in "\n".join(caplog.messages).splitlines() if "step_of" not in line]
    assert [line.count("model=new ") * line.count(" version=triage@v2") for line in lines] == [0, 1, 1]


@pytest.mark.parametrize("stays", [False, True])
def test_a_rollout_of_a_pipeline_measures_runs_as_a_whole(tmp_path: Path, stays: bool) -> None:
    order = RolloutOrder("r", "triage", "v1", "v2", step=1, staying=("acme",) if stays else ())
    split = {"v1": {"pipeline": "old"}, "v2": {"pipeline": "new", "weight": 1}}
    with providing() as provider, serving(tmp_path, provider, split) as gateway:
        seen, key = Seen(), gateway.add_tenant("acme", models=["triage"])

        def follow() -> None:
            gateway.app.rollouts.sink = seen
            gateway.app.follow([order])

        gateway.call(follow)
        list(ask(gateway, key=key, stream=True))
        assert len(provider.asked) == (1 if stays else 2)
        ask(gateway, "triage@v2", key=key)
        provider.status = 500
        with pytest.raises(openai.APIStatusError):
            ask(gateway, key=key)
        eventually(gateway.is_idle)
        eventually(lambda: gateway.app.pipelines is not None and not gateway.app.pipelines.num_open)
        if stays:
            assert seen.all == []
            return
        assert [(one.arm, one.tenant) for one in seen.all] == [(Arm.NEW, "acme")] * 2
        assert seen.values(Arm.NEW, Metric.ERRORS) == [0.0, 1.0]
        good, bad = (one.timing for one in seen.all)
        assert bad is None
        assert good is not None
        assert (good.in_flight, good.output_tokens) == (0, 2)
        assert good.ttft_s is not None


def test_a_pipeline_may_follow_a_model_and_a_session_keeps_what_it_has(tmp_path: Path) -> None:
    versions = {"v1": {"model": "small", "weight": 50}, "v2": {"pipeline": "new", "weight": 50}}
    with providing() as provider, serving(tmp_path, provider, versions) as gateway:
        users = [f"user {number}" for number in range(8)]

        def calls(user: str) -> int:
            before = len(provider.asked)
            ask(gateway, user=user)
            return len(provider.asked) - before

        first = {user: calls(user) for user in users}
        assert set(first.values()) == {1, 2}
        assert {user: calls(user) for user in users} == first
        # What a model can be asked and a pipeline cannot, is refused by the one that has it.
        assert gateway.openai.embeddings.create(
            model="triage@v1", input="x", encoding_format="float"
        ).usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="pipeline"):
            gateway.openai.embeddings.create(model="triage@v2", input="x")


def test_a_tenant_needs_the_name_of_the_route_and_not_of_its_pipelines(tmp_path: Path) -> None:
    with providing() as provider, serving(tmp_path, provider, SPLIT) as gateway:
        key, other = gateway.add_tenant("acme", models=["triage"]), gateway.add_tenant("rival", models=["old"])
        assert ask(gateway, key=key).choices
        assert ask(gateway, "triage@v2", key=key).choices
        assert [card.id for card in gateway.client(key).models.list()] == ["triage"]
        for name in ("triage", "triage@v1"):
            with pytest.raises(openai.NotFoundError):
                ask(gateway, name, key=other)
