"""What requests took, as replicas measured it: in the books, the metrics and the lines of the gateway before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.api.relay import COST_HEADER
from penstock.core.request import Cost
from penstock.gateway.proxy.ruling import RuleTally, Ruling
from penstock.gateway.proxy.stranded import WAIT_S
from penstock.gateway.records.device_time import DeviceTime
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe.gateway_catalog import GATEWAY_CATALOG, RULE_SAVINGS
from penstock.observe.registry import Registry
from penstock.router.rules import Verdict
from penstock.tenancy.prices import NANOS, Price
from penstock.tenancy.usage import Usage
from tests.gateway.provider import providing
from tests.gateway.records.test_recorder import look
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.server.replica import NAME, Replica, serving
from tests.server.test_cost import spent
from tests.waiting import eventually

HOURLY = Price(output=1.0, replica_hour=36.0)


def ask(client: openai.OpenAI, prompt: object = "the first and the second", **options: Any) -> Any:
    return client.completions.create(model=NAME, prompt=prompt, temperature=0, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(step_s=0.002, chunk_tokens=16) as found:
        yield found


@pytest.fixture
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    url = f"http://{replica.host}:{replica.port}"
    with running_gateway(pools={NAME: ModelSettings(replicas=[url], price=HOURLY)}) as found:
        yield found


def test_requests_are_charged_what_the_replica_says_they_took(replica: Replica, gateway: RunningGateway) -> None:
    before = sum(spent(replica.final_metrics()).values())
    acme, zeta = (gateway.client(gateway.add_tenant(tenant)) for tenant in ("acme", "zeta"))
    for client in (acme, zeta, acme):
        ask(client, max_tokens=40)
        list(ask(client, max_tokens=30, stream=True))
    eventually(lambda: len(gateway.ledger.usages) == 6)
    took_s = sum(spent(replica.final_metrics()).values()) - before
    usages = gateway.ledger.usages
    assert sum(usage.device_us for usage in usages) / 1e6 == pytest.approx(took_s, abs=1e-5)
    assert min(usage.device_us for usage in usages) > 30 * 0.002 * 1e6 * 0.9
    assert min(usage.kv_block_ms for usage in usages) > 0
    for usage in usages:
        by_time = usage.device_us / 1e6 * 36.0 / 3600 * NANOS
        assert usage.cost_nanos == pytest.approx(usage.output_tokens * 1000 + by_time, abs=NANOS * 1e-8)
    seen = look(gateway)
    assert seen["device_seconds_total", NAME] == pytest.approx(sum(u.device_us for u in usages) / 1e6, abs=1e-5)
    assert seen["kv_block_seconds_total", NAME] == pytest.approx(sum(u.kv_block_ms for u in usages) / 1e3, abs=0.01)
    assert seen["cost_total", NAME] == pytest.approx(sum(u.cost_nanos for u in usages) / NANOS)
    for tenant, num_requests in (("acme", 4), ("zeta", 2)):
        its_own = [usage.device_us / 1e6 for usage in usages if usage.tenant_id == tenant]
        assert len(its_own) == num_requests
        assert seen["tenant_device_seconds_total", tenant] == pytest.approx(sum(its_own), abs=1e-5)


def test_what_it_took_is_for_the_gateway_and_not_for_its_client(gateway: RunningGateway) -> None:
    raw = gateway.openai.completions.with_raw_response.create(model=NAME, prompt="one", max_tokens=3)
    assert COST_HEADER not in raw.headers
    eventually(lambda: len(gateway.ledger.usages) == 1)
    assert gateway.ledger.usages[0].device_us > 0


def test_a_prompt_in_the_cache_is_cheaper_because_it_takes_less(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme"))

    def ask_again() -> Usage:
        num_before = len(gateway.ledger.usages)
        ask(client, list(range(10, 210)), max_tokens=2)
        return eventually(lambda: gateway.ledger.usages, lambda usages: len(usages) > num_before)[-1]

    first = ask_again()
    assert first.cached_tokens == 0
    again = eventually(ask_again, lambda usage: usage.device_us < 0.5 * first.device_us)  # the engine may be held up
    assert again.cached_tokens > 100
    assert again.cost_nanos < 0.5 * first.cost_nanos


def test_a_stream_that_moved_pays_both_replicas() -> None:
    with slow_and_fast(fast_step_s=0.01) as (gateway, slow, fast):
        chunks = ask(gateway.openai, max_tokens=120, stream=True)  # most of it at the fast one, whenever it moves
        for _ in range(2):
            next(chunks)
        gateway.set_in_use(fast, True)
        slow.call("POST", "/v1/penstock/drain")
        list(chunks)
        eventually(lambda: any(usage.requests for usage in gateway.ledger.usages))
        parts = [sum(spent(replica.final_metrics()).values()) for replica in (slow, fast)]
    paid_s = sum(usage.device_us for usage in gateway.ledger.usages) / 1e6
    assert parts[1] > 0.4  # so that it cannot be taken for what the slow one took
    assert parts[1] + 0.18 < paid_s < sum(parts) + 1e-5  # all but a step that was begun when the stream moved


def test_a_stream_that_nobody_carries_on_pays_what_its_replica_said() -> None:
    with serving(step_s=0.05) as only, running_gateway(only) as gateway:
        chunks = ask(gateway.openai, max_tokens=500, stream=True)
        for _ in range(6):
            next(chunks)
        only.loop.call_soon_threadsafe(only.app.drain.begin, "the GPU is broken")
        eventually(lambda: len(gateway.app.stranded) == 1)
        gateway.advance(WAIT_S)
        with pytest.raises(openai.APIError):
            list(chunks)
        eventually(lambda: any(usage.requests for usage in gateway.ledger.usages))
    assert sum(usage.device_us for usage in gateway.ledger.usages) > 6 * 0.05 * 1e6 * 0.9


def test_a_client_that_leaves_is_charged_by_what_others_tokens_took(gateway: RunningGateway) -> None:
    ask(gateway.openai, max_tokens=40)
    stream = ask(gateway.openai, max_tokens=2000, stream=True)
    for _ in range(30):
        next(stream)
    stream.close()
    eventually(lambda: sum(usage.requests for usage in gateway.ledger.usages) == 2)
    whole, left = gateway.ledger.usages[0], gateway.ledger.usages[-1]
    assert left.output_tokens >= 30
    assert left.device_us / left.tokens == pytest.approx(whole.device_us / whole.tokens, rel=0.01)
    assert left.kv_block_ms > 0
    eventually(gateway.is_idle)


def test_a_server_that_measures_nothing_is_paid_by_the_token() -> None:
    with providing(says="hello") as provider:
        pools = {"m": ModelSettings(replicas=[provider.url], price=Price(1.0, 1.0, replica_hour=36.0))}
        with running_gateway(pools=pools) as gateway:
            gateway.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], max_tokens=5)
            eventually(lambda: len(gateway.ledger.usages) == 1)
            (usage,) = gateway.ledger.usages
    assert usage.device_us == usage.kv_block_ms == 0
    assert usage.cost_nanos == usage.tokens * 1000


def test_an_estimate_is_the_mean_of_what_was_measured() -> None:
    times = DeviceTime()
    usage = TokenUsage(90, 10)
    assert times.estimate("m", usage) is None
    times.learn("m", usage, Cost(1.0, 4.0))
    times.learn("m", TokenUsage(100, 0), Cost(2.0, 2.0))
    assert times.estimate("m", TokenUsage(10, 10)) == Cost(3.0 * 20 / 200, 6.0 * 20 / 200)
    assert times.estimate("n", usage) is None


def test_what_a_rule_saves_counts_device_time_the_other_models_by_its_mean() -> None:
    times, registry = DeviceTime(), Registry(GATEWAY_CATALOG)
    times.learn("big", TokenUsage(50, 50), Cost(2.0, 0.0))
    prices = {"small": Price(replica_hour=3600.0), "big": Price(replica_hour=7200.0)}
    rules = RuleTally(registry)
    ruling = Ruling("auto", Verdict("short", "small"), False, "big", "big", "small")
    rules.ended(ruling, "small", TokenUsage(10, 10, work=Cost(0.1, 0.0)), prices, times)
    (saved,) = dict(dict(registry.series())[RULE_SAVINGS]).values()
    assert saved == pytest.approx(0.4 * 2.0 - 0.1 * 1.0)
