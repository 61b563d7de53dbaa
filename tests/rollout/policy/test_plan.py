"""Plans: what a file says over the default, and what it may not say."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from penstock.core.errors import ConfigError
from penstock.core.rollout import Metric
from penstock.core.slo import Slo
from penstock.rollout.policy.plan import RolloutPlan, default_plan, gate_metric, plan_from


def test_default_plan_begins_with_a_shadow_and_ends_with_all_clients() -> None:
    steps = default_plan(Slo()).steps
    assert [step.shadow for step in steps] == [0.05, None, None, None, None, None]
    assert [step.share for step in steps] == [None, 0.01, 0.05, 0.25, 0.5, 1.0]


def test_margins_come_from_the_objectives() -> None:
    gates = default_plan(Slo(errors=0.01, quantile=0.99, tpot_s=None)).gates
    assert gates["errors"].margin == 0.01
    assert gates["refusals"].margin == pytest.approx(0.001)
    assert gates["tpot"].margin == 0.1
    assert not gates["tpot"].waits
    assert gates["ttft"].margin < gates["tpot"].margin
    assert gates["ttft"].waits
    assert "ttft_p99" in gates


def test_a_file_changes_what_it_names() -> None:
    plan = plan_from({"gates": {"tpot": {"margin": 0.2}, "ttft_p99": {"margin": 0.3}}, "hold_s": 5}, Slo())
    assert plan.gates["tpot"].margin == 0.2
    assert plan.gates["tpot"].tenants  # as by default
    assert plan.gates["ttft_p99"].margin == 0.3
    assert plan.steps == default_plan(Slo()).steps
    assert plan.hold_s == 5.0


def test_a_gate_can_be_taken_out() -> None:
    plan = plan_from({"gates": {"cost": {"enabled": False}}}, Slo())
    assert "cost" in plan.gates
    assert "cost" not in plan.enabled_gates


def test_a_plan_is_printed_as_the_file_that_says_the_same() -> None:
    plan = plan_from({"steps": [{"shadow": 0.2}, {"share": 1}], "alpha": 0.005}, Slo())
    again = plan_from(yaml.safe_load(plan.yaml()), Slo())
    assert again == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RolloutPlan) == plan


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": [{"share": 0.5}, {"share": 0.1}, {"share": 1}]}, "shares must grow"),
        ({"steps": [{"share": 0.5}]}, "last step"),
        ({"steps": [{"shadow": 0.5}]}, "last step"),
        ({"steps": []}, "list of mappings"),
        ({"steps": [{"share": 0.5}, {"shadow": 0.5}, {"share": 1}]}, "come before"),
        ({"steps": [{"share": 0.5, "shadow": 0.5}, {"share": 1}]}, "either"),
        ({"steps": [{"share": 1, "min_s": 10, "max_s": 5}]}, "at most 5 s"),
        ({"steps": [{"shere": 1}]}, "did you mean 'steps.0.share'"),
        ({"steps": [{"share": 2}]}, "steps.0.share"),
        ({"gates": {"tpto": {}}}, "did you mean 'tpot'"),
        ({"gates": {"errors_p95": {}}}, "no gate"),
        ({"gates": {"tpot": 0.1}}, "is a mapping"),
        ({"gates": {"tpot": {"margin": 0}}}, "margin"),
        ({"gates": {"tpot": {"undecided": "wait"}}}, "undecided"),
        ({"gates": []}, "is a mapping"),
        ({"alpha": 0.5}, "alpha"),
        ({"on_promot": "hold"}, "did you mean 'on_promote'"),
    ],
)
def test_nonsense_is_refused_with_its_place(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from(values, Slo())
    assert said in caught.value.message
    assert caught.value.param


def test_quantiles_are_gates_by_their_names() -> None:
    assert gate_metric("ttft_p95") == (Metric.TTFT, 0.95)
    assert gate_metric("latency_p999") == (Metric.LATENCY, 0.999)
    assert gate_metric("output_tokens") == (Metric.OUTPUT_TOKENS, None)
