import logging

import pytest

from penstock.observe.catalog import CATALOG
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually


def test_after_some_traffic_every_metric_of_the_catalog_is_exported(guided_replica: Replica) -> None:
    guided_replica.openai.completions.create(model=NAME, prompt="some traffic", max_tokens=5)
    guided_replica.post("/v1/completions", prompt="and some that is guided", guided_choice=["yes", "no"])
    names = {name.partition("{")[0] for name in guided_replica.final_metrics()}
    for metric in CATALOG:
        assert (f"{metric.name}_count" if metric.kind == "histogram" else metric.name) in names


def test_what_the_weights_are_in_is_told() -> None:
    with serving() as replica:
        text = replica.call("GET", "/metrics")[2].decode()
        assert f'model="{NAME}",device="fake"' in text
        (line,) = (line for line in text.splitlines() if line.startswith("penstock_replica_info{"))
        assert 'number_format="' in line
        assert 'quant="none"' in line


def test_every_exit_is_counted_once() -> None:
    with serving() as replica:
        for _ in range(3):
            replica.openai.completions.create(model=NAME, prompt="x", max_tokens=4)
        list(
            replica.openai.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "x"}], max_tokens=4, stream=True
            )
        )
        replica.post("/v1/completions", prompt="x", max_tokens=0)
        replica.call("POST", "/v1/completions", {"model": "another", "prompt": "x"})
        counted = {name: n for name, n in replica.final_metrics().items() if name.startswith("penstock_requests_total")}
        assert counted == {
            "penstock_requests_total{ok,completions,200}": 3,
            "penstock_requests_total{ok,chat,200}": 1,
            "penstock_requests_total{invalid_request,completions,400}": 1,
            "penstock_requests_total{model_not_found,completions,404}": 1,
        }


def test_the_parts_of_the_time_to_first_token_add_up_to_it() -> None:
    with serving(step_s=0.02) as replica:
        replica.openai.completions.create(model=NAME, prompt="parts", max_tokens=3)
        metrics = replica.final_metrics()
        parts = {
            part: metrics[f"penstock_ttft_part_seconds_sum{{{NAME},{part}}}"]
            for part in ("tokenize", "queue", "prefill", "first_token")
        }
        assert sum(parts.values()) == pytest.approx(metrics[f"penstock_ttft_seconds_sum{{{NAME}}}"], rel=1e-3)
        assert parts["prefill"] >= 0.02
        after_first = 2 * metrics[f"penstock_tpot_seconds_sum{{{NAME}}}"]
        assert after_first + parts["first_token"] >= 0.04  # a first token that was late is late for this too


def test_tokens_and_prefix_hits_are_counted() -> None:
    with serving() as replica:
        prompt = [token_id + 10 for token_id in range(20)]
        for _ in range(2):
            replica.openai.completions.create(model=NAME, prompt=prompt, max_tokens=4, temperature=0)
        metrics = replica.final_metrics()
        assert metrics["penstock_generated_tokens_total"] == 8
        assert metrics["penstock_prefix_query_tokens_total"] == 40
        assert 16 <= metrics["penstock_prefix_hit_tokens_total"] <= 19
        assert metrics[f"penstock_prompt_tokens_sum{{{NAME}}}"] == 40
        assert metrics[f"penstock_output_tokens_sum{{{NAME}}}"] == 8


def test_every_request_leaves_one_line(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock.request"):
        request = {"model": NAME, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
        replica.call("POST", "/v1/completions", request, **{"X-Request-Id": "my-id"})
        eventually(lambda: caplog.messages)
    (line,) = caplog.messages
    assert line.startswith("id=my-id route=completions outcome=ok prompt=")
    assert "output=2" in line
