"""The real engine: what requests are charged is what it worked."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.prices import Price
from tests.cli.real_server import MODEL, RealServer
from tests.gateway.running import running_gateway
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def totals(server: RealServer) -> tuple[float, float]:
    """What requests were charged, and what the device worked."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples]
    charged_s, busy_s = (
        sum(sample.value for sample in samples if sample.name == f"penstock_{name}_seconds_total")
        for name in ("device", "busy")
    )
    return charged_s, busy_s


def test_the_sum_over_requests_is_the_time_the_device_worked(server: RealServer) -> None:
    def ask(index: int) -> None:
        stream = server.openai.completions.create(
            model=MODEL,
            prompt=f"Once upon a time there were {index % 3} bears",
            max_tokens=10 + index,
            stream=True,
            stop=["and"] if index % 2 else None,
        )
        for number, _ in enumerate(stream):
            if index == 3 and number == 4:
                stream.close()  # a client that leaves pays for what it got
                return

    before_s = totals(server)[1]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    eventually(server.is_idle)
    charged_s, busy_s = totals(server)
    assert busy_s > before_s
    assert charged_s == pytest.approx(busy_s, rel=0.01)


def test_what_a_gateway_charges_is_what_its_replica_worked(server: RealServer) -> None:
    eventually(server.is_idle)
    before_s = totals(server)[0]
    with running_gateway(pools={MODEL: ModelSettings(replicas=[server.url], price=Price(replica_hour=2.0))}) as gateway:
        clients = [gateway.client(gateway.add_tenant(tenant)) for tenant in ("acme", "zeta")]

        def ask(index: int) -> None:
            answer = clients[index % 2].completions.create(
                model=MODEL,
                prompt=f"Once upon a time there were {index % 3} bears",
                max_tokens=6 + index,
                stream=index % 3 > 0,
            )
            if index % 3:
                list(answer)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(12)))
        eventually(gateway.is_idle)
        usages = gateway.ledger.usages
    eventually(server.is_idle)
    charged_s = sum(usage.device_us for usage in usages) / 1e6
    assert charged_s == pytest.approx(totals(server)[0] - before_s, rel=0.01)
    assert sum(usage.cost_nanos for usage in usages) / 1e9 == pytest.approx(charged_s * 2.0 / 3600, rel=1e-3)
    assert {usage.tenant_id for usage in usages if usage.device_us} == {"acme", "zeta"}
