"""Chains of models with a real client: what leads on, what does not, and what the client is told of it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest

from penstock.admission.settings import AdmissionSettings
from penstock.core.errors import ConfigError
from penstock.gateway.proxy.fallback import failure_of_answer
from penstock.gateway.settings.gateway import ModelSettings, routes_of
from penstock.router.routes import Failure
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]
TOO_LONG = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."


@contextlib.contextmanager
def chained(*providers: Provider, **options: Any) -> Iterator[RunningGateway]:
    """Models a, b and c, one for each; a falls back to the others, in this order."""
    names = "abc"[: len(providers)]
    pools = {name: ModelSettings(replicas=[one.url]) for name, one in zip(names, providers, strict=True)}
    pools["a"] = ModelSettings(replicas=[providers[0].url], fallback=list(names[1:]), **options)
    with running_gateway(pools=pools) as gateway:
        yield gateway
        eventually(gateway.is_idle)


def ask(client: openai.OpenAI, model: str = "a", *, stream: bool = False, **options: Any) -> tuple[str, str | None]:
    """The answer's text, and what its header says of the way to it."""
    raw = client.chat.completions.with_raw_response.create(
        model=model, stream=stream, **{"messages": MESSAGES, "max_tokens": 5} | options
    )
    found: Any = raw.parse()
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
    else:
        text = found.choices[0].message.content
    return text, raw.headers.get("x-penstock-fallback")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 503, 429, 401, 404])
def test_a_model_that_fails_leads_on_to_the_next(status: int, stream: bool) -> None:
    with providing(status=status) as one, providing(says="from b") as two, chained(one, two) as gateway:
        assert ask(gateway.openai, stream=stream) == ("from b", "a->b; error")
        assert two.asked[0]["model"] == "b"
        assert two.asked[0] | {"model": "a"} == one.asked[0]
        eventually(lambda: [usage.model for usage in gateway.ledger.usages] == ["b"])
        assert gateway.ledger.usages[0].input_tokens == 3


def test_a_model_that_works_is_the_one_that_answers() -> None:
    with providing(says="from a") as one, providing() as two, chained(one, two, slow_after_s=600.0) as gateway:
        assert ask(gateway.openai) == ("from a", None)
        assert not two.asked


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_is_gone_along_to_its_end(stream: bool) -> None:
    with (
        providing(status=500) as one,
        providing(status=400, error=TOO_LONG) as two,
        providing(says="from c") as three,
        chained(one, two, three) as gateway,
    ):
        assert ask(gateway.openai, stream=stream) == ("from c", "a->b; error, b->c; context")


def test_when_all_fail_the_last_error_is_told() -> None:
    with (
        providing(status=500) as one,
        providing(status=503) as two,
        providing(status=500, error="the last") as three,
        chained(one, two, three) as gateway,
    ):
        with pytest.raises(openai.InternalServerError, match="the last") as refused:
            ask(gateway.openai)
        assert refused.value.response.headers["x-penstock-fallback"] == "a->b; error, b->c; error"
        assert [len(provider.asked) for provider in (one, two, three)] == [1, 1, 1]
        assert not gateway.ledger.usages


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_model_is_left_for_the_next_and_told_so(stream: bool) -> None:
    with (
        providing(dawdles=True) as one,
        providing(says="from b") as two,
        chained(one, two, slow_after_s=0.1) as gateway,
    ):
        assert ask(gateway.openai, stream=stream) == ("from b", "a->b; slow")
        eventually(gateway.is_idle)
        assert [usage.model for usage in gateway.ledger.usages] == ["b"]


def test_a_slow_model_is_better_than_one_that_is_not_there() -> None:
    with (
        providing(dawdles=True, says="from a") as one,
        providing() as two,
        chained(one, two, slow_after_s=5.0) as gateway,
        ThreadPoolExecutor(1) as client,
    ):
        two.models = 500
        (_, absent) = gateway.app.replicas.values()
        for _ in range(3):
            gateway.call(lambda: absent.health.probed(False))
        gateway.advance(0.5)  # it is looked at so often
        eventually(lambda: absent.snapshot.state == "out")
        answer = client.submit(ask, gateway.openai)
        eventually(lambda: one.asked)
        gateway.advance(5.0)
        one.may_answer.set()
        assert answer.result() == ("from a", None)
        assert not two.asked


def test_a_slow_chain_ends_with_the_last_model_however_slow() -> None:
    with (
        providing(dawdles=True) as one,
        providing(dawdles=True) as two,
        providing(dawdles=True, says="from c") as three,
        chained(one, two, three, slow_after_s=0.1) as gateway,
        ThreadPoolExecutor(1) as client,
    ):
        answer = client.submit(ask, gateway.openai)
        eventually(lambda: three.asked)
        gateway.advance(5.0)
        three.may_answer.set()
        assert answer.result() == ("from c", "a->b; slow, b->c; slow")


def test_what_is_too_long_for_a_provider_leads_on() -> None:
    with (
        providing(status=400, error=TOO_LONG, code="context_length_exceeded") as one,
        providing(says="from b") as two,
        chained(one, two) as gateway,
    ):
        assert ask(gateway.openai) == ("from b", "a->b; context")


def test_what_is_too_long_is_found_at_the_door() -> None:
    with serving(num_blocks=8) as small, providing(says="from b") as two:
        pools = {
            NAME: ModelSettings(replicas=[f"http://{small.host}:{small.port}"], fallback=["b"]),
            "b": ModelSettings(replicas=[two.url]),
        }
        with running_gateway(pools=pools) as gateway:
            assert ask(gateway.openai, NAME, max_tokens=4000) == ("from b", f"{NAME}->b; context")
            assert ask(gateway.openai, NAME, max_tokens=4000, stream=True) == ("from b", f"{NAME}->b; context")


def test_the_next_models_context_sets_the_limit_that_nobody_else_did() -> None:
    with serving(num_blocks=8) as small, providing(says="from b") as two:
        pools = {
            NAME: ModelSettings(replicas=[f"http://{small.host}:{small.port}"], fallback=["b"]),
            "b": ModelSettings(replicas=[two.url]),
        }
        with running_gateway(pools=pools) as gateway:
            options: dict[str, Any] = {"max_tokens": openai.omit, "messages": [{"role": "user", "content": "x " * 99}]}
            assert ask(gateway.openai, NAME, **options)[1] == f"{NAME}->b; context"
            assert "max_tokens" not in two.asked[0]
            client = gateway.client(gateway.add_tenant("acme", limits={"max_output": 50}))
            assert ask(client, NAME, **options)[1] == f"{NAME}->b; context"
            assert two.asked[1]["max_tokens"] == 50


@pytest.mark.parametrize(("max_wait_s", "reason"), [(0.01, "error"), (60.0, "slow")], ids=["refused", "queued"])
def test_a_model_that_has_too_much_to_do_leads_on(max_wait_s: float, reason: str) -> None:
    classes = {name: replace(rules, max_wait_s=max_wait_s) for name, rules in AdmissionSettings().classes.items()}
    with serving(max_num_seqs=1, step_s=0.01) as busy, providing(says="from b") as two:
        urls = [f"http://{busy.host}:{busy.port}"]
        pools = {
            NAME: ModelSettings(replicas=urls, fallback=["b"], slow_after_s=5.0),
            "b": ModelSettings(replicas=[two.url]),
        }
        with (
            running_gateway(pools=pools, admission=AdmissionSettings(classes=classes)) as gateway,
            ThreadPoolExecutor(1) as client,
        ):
            stream = gateway.openai.chat.completions.create(
                model=NAME, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            eventually(lambda: gateway.app.replicas[urls[0]].snapshot.load.num_running == 1)
            with busy.engine_paused():  # it stays busy for as long as this takes
                answer = client.submit(ask, gateway.openai, NAME)
                if reason == "slow":
                    eventually(lambda: gateway.app.admission.num_waiting(NAME))
                    gateway.advance(5.0)
                assert answer.result() == ("from b", f"{NAME}->b; {reason}")
                assert gateway.app.admission.num_waiting(NAME) == 0
            stream.close()
            eventually(gateway.is_idle)


def test_a_model_without_a_replica_leads_on() -> None:
    with providing(says="from b") as two:
        pools = {
            "a": ModelSettings(replicas=["http://127.0.0.1:1"], fallback=["b"]),
            "b": ModelSettings(replicas=[two.url]),
        }
        with running_gateway(pools=pools, waits=False) as gateway:
            eventually(lambda: any(replica.snapshot.state == "ready" for replica in gateway.app.replicas.values()))
            assert ask(gateway.openai) == ("from b", "a->b; error")


@pytest.mark.parametrize("status", [400, 422, 403])
def test_what_is_wrong_with_the_request_leads_nowhere(status: int) -> None:
    with (
        providing(status=status, error="temperature is too high") as one,
        providing() as two,
        chained(one, two) as gateway,
    ):
        with pytest.raises(openai.APIStatusError, match="temperature is too high") as refused:
            ask(gateway.openai)
        assert refused.value.status_code == status
        assert not two.asked
        assert len(one.asked) == 1


def test_only_what_the_chain_is_for_leads_on() -> None:
    with providing(status=500) as one, providing() as two, chained(one, two, fallback_on=["context"]) as gateway:
        with pytest.raises(openai.InternalServerError):
            ask(gateway.openai)
        one.status, one.error = 400, TOO_LONG
        assert ask(gateway.openai)[1] == "a->b; context"
        assert len(two.asked) == 1


def test_a_model_that_the_tenant_may_not_use_is_passed_over() -> None:
    with (
        providing(status=500) as one,
        providing() as two,
        providing(says="from c") as three,
        chained(one, two, three) as gateway,
    ):
        client = gateway.client(gateway.add_tenant("acme", models=["a", "c"]))
        assert ask(client) == ("from c", "a->c; error")
        client = gateway.client(gateway.add_tenant("alone", models=["a"]))
        with pytest.raises(openai.InternalServerError):
            ask(client)
        assert not two.asked


def test_what_was_reserved_is_settled_once_by_what_was_used() -> None:
    with providing(status=500) as one, providing() as two, chained(one, two) as gateway:
        limits = {"tokens_per_minute": 1000, "concurrency": 1}
        client = gateway.client(gateway.add_tenant("acme", limits=limits))
        for _ in range(4):  # each reserves most of the limit, and uses four
            assert ask(client, max_tokens=700)[1] == "a->b; error"
            eventually(gateway.is_idle)


def test_a_client_that_leaves_ends_the_chain() -> None:
    with providing(dawdles=True, status=500) as one, providing() as two, chained(one, two) as gateway:
        client = http.client.HTTPConnection("127.0.0.1", gateway.port)
        client.request("POST", "/v1/chat/completions", json.dumps({"model": "a", "messages": MESSAGES}))
        eventually(lambda: one.asked)
        client.close()
        eventually(gateway.is_idle)
        one.may_answer.set()
        assert ask(gateway.openai, "b")
        assert len(two.asked) == 1  # that one


def test_a_client_that_leaves_while_it_waits_for_the_next_model_gives_up_its_place() -> None:
    with serving(max_num_seqs=1, step_s=0.2) as busy, providing(status=500) as one:
        url = f"http://{busy.host}:{busy.port}"
        pools = {
            "a": ModelSettings(replicas=[one.url], fallback=[NAME]),
            NAME: ModelSettings(replicas=[url]),
        }
        classes = {name: replace(rules, max_wait_s=600.0) for name, rules in AdmissionSettings().classes.items()}
        with running_gateway(pools=pools, admission=AdmissionSettings(classes=classes)) as gateway:
            stream = gateway.openai.chat.completions.create(
                model=NAME, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            eventually(lambda: gateway.app.replicas[url].snapshot.load.num_running == 1)
            client = http.client.HTTPConnection("127.0.0.1", gateway.port)
            client.request("POST", "/v1/chat/completions", json.dumps({"model": "a", "messages": MESSAGES}))
            eventually(lambda: gateway.app.admission.num_waiting(NAME), lambda num: num == 1)
            client.close()
            eventually(lambda: gateway.app.admission.num_waiting(NAME), lambda num: num == 0)
            assert gateway.app.replicas[url].snapshot.load.num_running == 1  # what it waited for still goes on
            stream.close()
            eventually(gateway.is_idle)


def test_models_of_one_provider_may_be_each_others_fallback() -> None:
    with providing(status=500) as only:
        pools = {
            "a": ModelSettings(replicas=[only.url], fallback=["b"]),
            "b": ModelSettings(replicas=[only.url]),
        }
        with running_gateway(pools=pools) as gateway:
            with pytest.raises(openai.InternalServerError):
                ask(gateway.openai)
            assert [asked["model"] for asked in only.asked] == ["a", "b"]


def test_a_chain_to_nowhere_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="'nothing', which is no route"):
        routes_of({"a": ModelSettings(replicas=["http://127.0.0.1:1"], fallback=["nothing"])})


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"...","code":"context_length_exceeded"}}',
        b'{"object":"error","message":"This model\'s maximum context length is 4096 tokens. However, ..."}',
        b'{"type":"error","error":{"message":"prompt is too long: 210000 tokens > 200000 maximum"}}',
        b'{"error":{"message":"the request exceeds the available context size, try increasing it"}}',
        b'{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: ..."}',
    ],
)
def test_the_servers_words_for_too_long_are_understood(body: bytes) -> None:
    assert failure_of_answer(400, body) is Failure.CONTEXT_LENGTH
    assert failure_of_answer(400, b'{"error":{"message":"messages must not be empty"}}') is None
