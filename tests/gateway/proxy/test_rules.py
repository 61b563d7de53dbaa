"""Rules in front of models, with a real client: where requests go, what the client is told, what it comes to."""

from __future__ import annotations

import contextlib
import json
import timeit
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.core.errors import ConfigError
from penstock.gateway.settings.gateway import GatewaySettings, ModelSettings, routes_of
from penstock.router.rules import Facts
from penstock.tenancy.prices import Price
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
RULES: list[dict[str, Any]] = [
    {"name": "tools", "tools": True, "to": "big"},
    {"name": "json", "response_format": ["json_schema"], "to": "big"},
    {"name": "code", "keywords": ["python"], "to": "big"},
    {"name": "easy", "tasks": ["summarize"], "to": "small"},
    {"name": "short", "max_prompt_tokens": 200, "to": "small"},
]


def loudness(facts: Facts) -> float:
    return sum(letter.isupper() for letter in facts.text) / max(1, len(facts.text))


def broken(facts: Facts) -> float:
    raise RuntimeError("no")


@contextlib.contextmanager
def ruled(
    small: Provider, big: Provider, rules: list[dict[str, Any]] | None = None, **auto: Any
) -> Iterator[RunningGateway]:
    pools = {
        "small": ModelSettings(replicas=[small.url], price=Price(1.0, 1.0)),
        "big": ModelSettings(replicas=[big.url], price=Price(10.0, 10.0)),
        "auto": ModelSettings(rules=RULES if rules is None else rules, **{"default": "big"} | auto),
    }
    with running_gateway(pools=pools) as gateway:
        yield gateway
        eventually(gateway.is_idle)


def ask(
    gateway: RunningGateway,
    content: Any = "hello",
    *,
    key: str = "none",
    model: str = "auto",
    task: str | None = None,
    **more: Any,
) -> tuple[str, str]:
    """Who answers, and what the header says of it."""
    raw = gateway.client(key).chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=5,
        extra_headers={"x-penstock-task": task} if task else None,
        **more,
    )
    return str(raw.parse().choices[0].message.content), raw.headers["x-penstock-rule"]


def test_the_rule_that_fired_chooses_the_model_and_is_told() -> None:
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big) as gateway:
        assert ask(gateway) == ("small", "short->small")
        assert ask(gateway, "word " * 500) == ("big", "default->big")
        assert ask(gateway, tools=[TOOL]) == ("big", "tools->big")
        assert ask(gateway, response_format=SCHEMA) == ("big", "json->big")
        assert ask(gateway, "my Python script") == ("big", "code->big")
        assert ask(gateway, [{"type": "text", "text": "some PYTHON"}]) == ("big", "code->big")
        assert ask(gateway, "word " * 500, task="summarize") == ("small", "easy->small")
        assert ask(gateway, "word " * 500, metadata={"x-penstock-task": "summarize"}) == ("small", "easy->small")
        assert {asked["model"] for asked in small.asked} == {"small"}
        assert {asked["model"] for asked in big.asked} == {"big"}
        eventually(lambda: len(gateway.ledger.usages) == 8)
        assert {usage.model for usage in gateway.ledger.usages} == {"small", "big"}


def test_only_the_last_words_of_the_user_are_searched() -> None:
    messages: Any = [
        {"role": "user", "content": "python"},
        {"role": "assistant", "content": "python"},
        {"role": "user", "content": "and now a poem"},
        {"role": "assistant", "content": "python"},
    ]
    rules = [*RULES[:3], {"name": "others", "tools": False, "to": "small"}]
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big, rules) as gateway:
        found = gateway.openai.chat.completions.create(model="auto", messages=messages, max_tokens=5)
        assert found.choices[0].message.content == "small"


def test_a_dry_run_takes_the_default_and_tells_what_it_would_save() -> None:
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big, dry_run=True) as gateway:
        assert ask(gateway) == ("big", "default->big;would=short->small")
        assert ask(gateway, tools=[TOOL]) == ("big", "default->big;would=tools->big")
        assert not small.asked
        rules = gateway.call(lambda: gateway.app.routes.routes["auto"].rules)
        eventually(lambda: len(gateway.ledger.usages) == 2)
        document = gateway.call(lambda: gateway.app.recorder.rules.document("auto", rules))
        rows = {row["rule"]: row for row in document["rules"]}
        assert (rows["short"]["requests"], rows["short"]["input_tokens"], rows["short"]["output_tokens"]) == (1, 3, 1)
        assert rows["short"]["saved"] == pytest.approx(4 * 9e-6)
        assert rows["tools"]["saved"] == 0.0
        assert (document["dry_run"], document["saved"]) == (True, pytest.approx(4 * 9e-6))
        text = gateway.metrics()
        assert 'penstock_gateway_rules_total{model="auto",rule="short",to="small",mode="dry_run"} 1' in text


def test_what_is_saved_is_counted_when_rules_are_in_force_too() -> None:
    with providing() as small, providing() as big, ruled(small, big) as gateway:
        ask(gateway)
        ask(gateway, tools=[TOOL])
        eventually(lambda: len(gateway.ledger.usages) == 2)
        rules = gateway.call(lambda: gateway.app.routes.routes["auto"].rules)
        document = gateway.call(lambda: gateway.app.recorder.rules.document("auto", rules))
        assert document["saved"] == pytest.approx(4 * 9e-6)


def test_a_tenant_goes_where_it_may_and_is_told_of_nothing_else() -> None:
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big) as gateway:
        only_big = gateway.add_tenant("a", models=["auto", "big"])
        only_small = gateway.add_tenant("b", models=["auto", "small"])
        without = gateway.add_tenant("c", models=["small", "big"])
        assert ask(gateway, key=only_big) == ("big", "default->big")
        assert ask(gateway, key=only_small) == ("small", "short->small")
        for key in (only_small, without):
            with pytest.raises(openai.NotFoundError, match="no model 'auto'") as caught:
                ask(gateway, "word " * 20_000, key=key)  # far too long, whatever is estimated
            assert "big" not in caught.value.message


@pytest.mark.parametrize(("content", "who"), [("please", "small"), ("DO IT NOW", "big")])
def test_a_scoring_function_of_the_operators_decides(content: str, who: str) -> None:
    rules = [
        {"name": "odd", "score": f"{__name__}:broken", "min_score": 0, "to": "big"},
        {"name": "calm", "score": f"{__name__}:loudness", "max_score": 0.5, "to": "small"},
    ]
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big, rules) as gateway:
        assert ask(gateway, content)[0] == who


def test_a_body_that_is_not_as_it_should_be_is_for_the_replica_to_refuse() -> None:
    with providing(says="small") as small, providing(says="big") as big, ruled(small, big) as gateway:
        assert ask(gateway, tools="none", response_format=3)[1] in ("short->small", "default->big")
        with pytest.raises(openai.BadRequestError):
            gateway.openai.post("/chat/completions", body={"messages": []}, cast_to=object)


def test_prompts_are_counted_where_the_words_are_known(replica_at_hand: Replica) -> None:
    """A token for every byte would be an estimate far off."""
    replica = replica_at_hand
    with providing(says="big") as big:
        pools = {
            NAME: ModelSettings(replicas=[f"http://{replica.host}:{replica.port}"]),
            "big": ModelSettings(replicas=[big.url]),
            "auto": ModelSettings(rules=[{"name": "short", "max_prompt_tokens": 300, "to": "big"}], default=NAME),
        }
        with running_gateway(pools=pools) as gateway:
            eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
            prompt_tokenizer = gateway.app.pools[NAME].tokens.prompt_tokenizer
            assert prompt_tokenizer is not None
            for words, expected in ((40, "short->big"), (100, f"default->{NAME}")):
                content = "the first " * words
                body = {"model": "auto", "messages": [{"role": "user", "content": content}], "max_tokens": 5}
                count = prompt_tokenizer.count(b"/v1/chat/completions", json.dumps(body).encode())
                assert (count <= 300) is (expected == "short->big")
                assert len(json.dumps(body)) > 300
                assert ask(gateway, content)[1] == expected


@pytest.mark.slow
@pytest.mark.drill
def test_rules_cost_a_request_microseconds() -> None:
    words = {"keywords": [f"word{number}" for number in range(100)], "to": "big"}
    models: dict[str, Any] = {"small": {"replicas": ["http://a"]}, "big": {"replicas": ["http://b"]}}
    models["auto"] = {"rules": [*RULES[:2], words, *RULES[3:]], "default": "big"}
    rules = routes_of(GatewaySettings(models=models).pools()).routes["auto"].rules
    assert rules is not None
    facts = Facts(100, text="nothing of interest here " * 20)
    took_s = min(timeit.repeat(lambda: rules.decide(facts, {"small", "big"}), number=20, repeat=10)) / 20
    assert took_s < 200e-6


@pytest.mark.parametrize(
    ("auto", "complaint"),
    [
        ({"rules": RULES}, "no default"),
        ({"rules": RULES, "default": "nothing"}, "no route"),
        ({"rules": [{"to": "small", "max_promt_tokens": 5}], "default": "small"}, "did you mean"),
        ({"rules": RULES, "default": "big", "replicas": ["http://c"]}, "models they lead to"),
        ({"rules": [{"to": "small", "score": "no.such:thing", "min_score": 1}], "default": "small"}, "cannot be had"),
        ({"rules": [{"to": "small", "score": "nobodys", "min_score": 1}], "default": "small"}, "cannot be had"),
    ],
)
def test_rules_that_make_no_sense_are_refused(auto: dict[str, Any], complaint: str) -> None:
    models = {"small": {"replicas": ["http://a"]}, "big": {"replicas": ["http://b"]}, "auto": auto}
    settings = GatewaySettings(models=models).pools()
    with pytest.raises(ConfigError, match=complaint):
        routes_of(settings)
