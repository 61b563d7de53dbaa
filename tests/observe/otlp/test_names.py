"""Our metrics under OpenTelemetry's names."""

from __future__ import annotations

from collections import defaultdict

from penstock.observe import catalog, gateway_catalog
from penstock.observe.catalog import CATALOG, Metric
from penstock.observe.device_catalog import DEVICE_CATALOG
from penstock.observe.fleet_catalog import FLEET_CATALOG
from penstock.observe.gateway_catalog import GATEWAY_CATALOG
from penstock.observe.otlp.names import named
from penstock.observe.rollout_catalog import ROLLOUT_CATALOG
from penstock.observe.watch_catalog import WATCH_CATALOG

GATEWAY, REPLICA = (*GATEWAY_CATALOG, *WATCH_CATALOG, *FLEET_CATALOG, *ROLLOUT_CATALOG), (*CATALOG, *DEVICE_CATALOG)


def test_what_the_conventions_have_a_name_for_goes_by_it() -> None:
    assert named(catalog.TTFT).name == named(gateway_catalog.TTFT).name == "gen_ai.server.time_to_first_token"
    assert named(catalog.TPOT).name == "gen_ai.server.time_per_output_token"
    assert named(catalog.REQUEST_LATENCY).name == "gen_ai.server.request.duration"
    tokens = [named(metric) for metric in (catalog.PROMPT_TOKENS, catalog.OUTPUT_TOKENS)]
    assert {one.name for one in tokens} == {"gen_ai.client.token.usage"}
    assert [one.fixed["gen_ai.token.type"] for one in tokens] == ["input", "output"]
    assert named(catalog.TTFT).attribute("model") == "gen_ai.request.model"


def test_all_others_go_by_our_own_with_dots_and_their_unit_apart() -> None:
    assert named(gateway_catalog.QUEUE_WAIT)[:2] == ("penstock.gateway.queue_wait", "s")
    assert named(catalog.KV_USAGE)[:2] == ("penstock.kv.usage", "1")
    assert named(gateway_catalog.TOKENS)[:2] == ("penstock.gateway.tokens", "{token}")
    assert named(catalog.PREEMPTIONS)[:2] == ("penstock.preemptions", "1")


def test_no_two_metrics_of_a_process_share_a_name_unless_they_are_one_histogram_by_kind() -> None:
    for process in (GATEWAY, REPLICA):
        by_name: dict[str, list[Metric]] = defaultdict(list)
        for metric in process:
            by_name[named(metric).name].append(metric)
        for name, metrics in by_name.items():
            if len(metrics) > 1:
                assert name == "gen_ai.client.token.usage"
                assert {metric.kind for metric in metrics} == {"histogram"}
                assert len({metric.buckets for metric in metrics}) == 1
