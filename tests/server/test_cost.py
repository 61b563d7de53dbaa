"""What requests cost, from the engine's steps to the replica's metrics and to its gateway."""

import re
import threading

import pytest

from penstock.api import relay
from penstock.core.request import Cost
from penstock.engine.accounts import Meter
from tests.server.relaying import ask, asking
from tests.server.replica import NAME, Replica, serving
from tests.server.test_gateway_routes import COMPLETIONS, body
from tests.waiting import eventually


def spent(metrics: dict[str, float], of: str = "device_seconds") -> dict[str, float]:
    """By tenant."""
    found = {re.fullmatch(rf"penstock_{of}_total\{{{NAME},?(.*)\}}", name): value for name, value in metrics.items()}
    return {match[1]: value for match, value in found.items() if match is not None}


def test_what_tenants_spent_is_what_the_device_worked() -> None:
    with serving(virtual_step_s=0.002) as replica:

        def use(tenant: str, max_tokens: int) -> None:
            for stop in (None, "a"):  # of one the engine knows the end, of the other only the server
                request = {"prompt": f"of {tenant}", "max_tokens": max_tokens, "stop": stop, "ignore_eos": True}
                replica.call("POST", COMPLETIONS, {"model": NAME} | request, **{relay.NAMESPACE_HEADER: tenant})

        users = [threading.Thread(target=use, args=(f"t{i}", 5 + 10 * i)) for i in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        replica.call("GET", "/health/deep")  # nobody's, and not lost

        def adds_up() -> bool:
            metrics = replica.final_metrics()
            return sum(spent(metrics).values()) == pytest.approx(metrics["penstock_busy_seconds_total"], rel=1e-6)

        eventually(adds_up)
        devices, blocks = spent(replica.metrics()), spent(replica.metrics(), "kv_block_seconds")
        assert devices.keys() == blocks.keys() == {"", "t0", "t1", "t2", "t3"}
        assert devices["t3"] > devices["t0"] > devices[""] > 0
        assert min(blocks.values()) > 0


def test_tenants_beyond_the_first_two_hundred_are_counted_together() -> None:
    with serving() as replica:
        recorder = replica.app._recorder
        for index in range(250):
            meter = Meter()
            meter.add(1.0, 2.0)
            recorder.pays(f"t{index}", meter)
        devices = spent(replica.metrics())
        assert len(devices) == 201
        assert devices["other"] == 50


def test_a_gateway_is_told_the_cost_of_a_stream_before_its_end(replica: Replica) -> None:
    stream = ask((replica.host, replica.port), COMPLETIONS, body(max_tokens=20))
    cost = relay.find_cost(stream)
    assert cost is not None
    assert cost.device_s > 0
    assert cost.kv_block_s > 0
    assert stream.index(b": cost ") > stream.index(b'"finish_reason":"length"')


def test_a_gateway_is_told_the_cost_of_a_whole_answer_and_nobody_else_is(replica: Replica) -> None:
    request = {"model": NAME, "prompt": "x", "max_tokens": 5}
    _, headers, _ = replica.call("POST", COMPLETIONS, request, **{relay.NAMESPACE_HEADER: "acme"})
    cost = relay.read_cost(headers[relay.COST_HEADER].encode())
    assert cost is not None
    assert cost.device_s > 0
    assert relay.COST_HEADER not in replica.call("POST", COMPLETIONS, request)[1]
    assert b": cost" not in ask((replica.host, replica.port), COMPLETIONS, body(max_tokens=5), None)


def test_the_cost_of_a_stream_that_is_given_back_is_told_and_added_to_what_comes() -> None:
    record = relay.StreamRecord()
    with (
        serving(step_s=0.01) as replica,
        asking((replica.host, replica.port), COMPLETIONS, body(max_tokens=1000)) as response,
    ):
        eventually(lambda: replica.engine.measured.load.steps, lambda number: number > 5)
        replica.loop.call_soon_threadsafe(replica.app.drain.begin, "the GPU is broken")
        record.append(response.read())
    assert record.is_given_back
    assert record.cost_elsewhere == Cost()
    record.envelope(body())
    assert record.cost_elsewhere.device_s > 0.03


def test_a_prompt_in_the_cache_costs_less_than_the_first_time() -> None:
    with serving(virtual_step_s=0.002, chunk_tokens=16) as replica:
        costs = []
        for _ in range(2):
            request = {"model": NAME, "prompt": list(range(10, 210)), "max_tokens": 2}
            headers = replica.call("POST", COMPLETIONS, request, **{relay.NAMESPACE_HEADER: "acme"})[1]
            costs.append(relay.read_cost(headers[relay.COST_HEADER].encode()))
        first, again = costs
        assert first is not None
        assert again is not None
        assert again.device_s < 0.5 * first.device_s
