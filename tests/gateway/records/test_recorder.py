"""What the door tells of its requests, in front of replicas that are real but for the model."""

from __future__ import annotations

import io
import logging
import sys
from collections import Counter
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.monitor.state import GatewayState, state_of
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.request_log import RequestLog
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.server.replica import NAME, Replica, engines_paused
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]
CHAT = "chat/completions"


@pytest.fixture
def replicas(two_replicas: list[Replica]) -> list[Replica]:
    return two_replicas


def samples(recorder: GatewayRecorder) -> dict[tuple[str, ...], float]:
    """By name, without what all begin with, and labels."""
    families = text_string_to_metric_families(recorder.render().decode())
    return {
        (one.name.removeprefix("penstock_gateway_"), *one.labels.values()): one.value
        for family in families
        for one in family.samples
    }


def look(gateway: RunningGateway) -> dict[tuple[str, ...], float]:
    def state() -> GatewayState:
        return state_of(gateway.app.replicas.values(), gateway.app.pools, gateway.app.admission, gateway.app.now())

    gateway.call(lambda: gateway.app.recorder.look(state()))
    return samples(gateway.app.recorder)


def test_requests_are_counted_once_by_how_they_end(replicas: list[Replica]) -> None:
    with running_gateway(*replicas) as gateway:
        key = gateway.add_tenant("acme", limits={"concurrency": 1})
        client = gateway.client(key)
        usage = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=5).usage
        assert usage is not None
        stream = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=400, stream=True)
        next(iter(stream))
        with engines_paused(replicas):
            seen = look(gateway)
            assert seen["requests_open", NAME] == seen["streams_open", NAME] == 1
            for wrong, error in {
                "concurrency": openai.RateLimitError,
                "model": openai.NotFoundError,
                "key": openai.AuthenticationError,
            }.items():
                with pytest.raises(error):
                    (gateway.client("psk_wrong") if wrong == "key" else client).chat.completions.create(
                        model="no-such" if wrong == "model" else NAME, messages=MESSAGES, max_tokens=5
                    )
            stream.close()
            eventually(gateway.is_idle)
        found = look(gateway)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "requests_total"}
    assert requests == {
        (NAME, CHAT, "ok", ""): 1,
        (NAME, CHAT, "client_gone", ""): 1,
        (NAME, CHAT, "refused", "concurrency"): 1,
        ("", CHAT, "refused", "model_not_found"): 1,
        ("", CHAT, "refused", "unauthenticated"): 1,
    }
    assert found["limit_refusals_total", "concurrency"] == 1
    assert found["request_seconds_count", NAME] == 1  # of those that were ok
    assert found["ttft_seconds_count", NAME] == 1  # of streams
    assert found["queue_wait_seconds_count", NAME] == 2
    assert found["streams_open", NAME] == 0
    (first, second) = gateway.ledger.usages
    assert (first.input_tokens, first.output_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    for kind in ("input", "cached", "output"):
        counted = getattr(first, f"{kind}_tokens") + getattr(second, f"{kind}_tokens")
        assert found["tokens_total", NAME, kind] == found["tenant_tokens_total", "acme", kind] == counted


def test_replicas_and_queues_are_read_when_asked_for(replicas: list[Replica]) -> None:
    with running_gateway(*replicas) as gateway:
        found = look(gateway)
        for replica in gateway.app.replicas:
            assert found["replica_state", NAME, replica, "ready"] == 1
            assert found["replica_state", NAME, replica, "out"] == 0
            assert found["replica_breaker", NAME, replica, "closed"] == 1
            assert found["replica_requests", NAME, replica] == 0
        assert [found["queue_length", NAME, name] for name in ("interactive", "standard", "batch")] == [0, 0, 0]


def test_streams_that_are_carried_on_are_counted() -> None:
    with slow_and_fast() as (gateway, slow, fast):
        stream = iter(
            gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, max_tokens=60, seed=3)
        )
        for _ in range(4):
            next(stream)
        gateway.set_in_use(fast, True)
        slow.kill_engine()
        list(stream)
        eventually(gateway.is_idle)
        found = look(gateway)
    assert found["streams_carried_on_total", NAME] == 1
    assert found["requests_total", NAME, CHAT, "ok", ""] == 1


def facts(tenant: str) -> RequestFacts:
    return RequestFacts(
        "0f", CHAT, Ending.OK, "", tenant, "abcdefghij", "m", "http://replica", 7, 3, 2, 0.001, 0.1, 0.5, 1
    )


def test_tenants_beyond_the_bound_are_counted_together() -> None:
    recorder = GatewayRecorder()
    for number in range(300):
        for _ in range(2):
            recorder.ended(replace(facts(f"t{number}"), device_s=0.5))
    found = {key: value for key, value in samples(recorder).items() if key[0].startswith("tenant_")}
    assert len(found) == (3 + 1) * 201
    assert found["tenant_tokens_total", "t199", "input"] == 14
    assert found["tenant_tokens_total", "other", "input"] == 100 * 14
    assert found["tenant_device_seconds_total", "t199"] == 1.0
    assert found["tenant_device_seconds_total", "other"] == 100 * 1.0


def test_a_line_says_who_where_how_long_and_how_it_ended() -> None:
    written = io.StringIO()
    logger = logging.Logger("lines", logging.INFO)
    logger.addHandler(logging.StreamHandler(written))
    with RequestLog(logger) as log:
        recorder = GatewayRecorder(log)
        recorder.ended(facts("acme"))
        recorder.ended(RequestFacts("1f", CHAT, Ending.REFUSED, "unauthenticated"))
    first, second = written.getvalue().splitlines()
    assert first.partition(" ")[2] == (
        "id=0f tenant=acme key=abcdefghij surface=chat/completions model=m replica=http://replica outcome=ok reason=- "
        "prompt=7 cached=3 output=2 queue_ms=1.0 ttft_ms=100.0 total_ms=500.0 tries=1"
    )
    assert "id=1f tenant=- key=- " in second
    assert "outcome=refused reason=unauthenticated" in second


def test_a_request_costs_the_loop_a_few_calls() -> None:
    """Calls of functions, Python's and built in: they do not depend upon the machine."""
    log = RequestLog(logging.Logger("off", logging.ERROR))
    recorder, one = GatewayRecorder(log), facts("acme")
    recorder.ended(one)  # the first of a tenant makes its counters
    counts: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _arg: counts.update([event]))
    try:
        recorder.ended(one)
    finally:
        sys.setprofile(None)
    assert counts["call"] + counts["c_call"] < 60


def test_no_replicas_kv_blocks_are_known_before_the_tokenizer_is(replicas: list[Replica]) -> None:
    def num_exact() -> float:
        return sum(value for key, value in look(gateway).items() if key[0] == "replica_kv_exact")

    with running_gateway(*replicas) as gateway:
        app, tokens = gateway.app, gateway.app.pools[NAME].tokens
        known = eventually(lambda: tokens.prompt_tokenizer)
        assert num_exact() == 0
        gateway.call(lambda: [app.admission.router.index.reset(name, []) for name in app.replicas])
        assert num_exact() == len(replicas)
        tokens.prompt_tokenizer = None
        assert num_exact() == 0
        tokens.prompt_tokenizer = known
