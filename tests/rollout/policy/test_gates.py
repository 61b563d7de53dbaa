"""Verdicts of gates, and how the probability of a false alarm is shared out."""

from __future__ import annotations

from math import log
from random import Random

import pytest
from msgspec.structs import replace

from penstock.core.rollout import BLOCK_S, Arm, Block, CellKey, Metric
from penstock.rollout.policy.evidence import LATE_S
from penstock.rollout.policy.gates import alphas, evidence_for, judge, with_tenants
from penstock.rollout.policy.plan import RolloutPlan
from penstock.rollout.policy.sentences import sentence
from penstock.rollout.policy.state import GateResult, Phase, RolloutState, Verdict
from tests.rollout.policy.blocks import BEGAN, block, plan, started, traffic

SHADOW = plan(steps=[{"shadow": 0.5}, {"share": 1}])
CLIENTS = plan(steps=[{"share": 0.5, "min_requests": 100}, {"share": 1}])


def gates(blocks: list[Block], of: RolloutPlan = CLIENTS, step: int = 0) -> dict[str, GateResult]:
    state = replace(started(of), phase=Phase.WATCHING, step=step, step_in_force=step)
    return judged(state, blocks)


def judged(state: RolloutState, blocks: list[Block]) -> dict[str, GateResult]:
    evidence = evidence_for(state)
    for one in blocks:
        evidence.add(one)
    evidence.close(max(one.at for one in blocks) + LATE_S + 1.0)
    state = with_tenants(state, evidence)
    return {gate.gate + (f"/{gate.tenant}" if gate.tenant else ""): gate for gate in judge(state, evidence)}


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.25, Verdict.WORSE), (1.0, Verdict.EQUAL), (0.8, Verdict.BETTER), (1.03, Verdict.UNDECIDED)],
)
def test_a_time_is_worse_equal_better_or_undecided(factor: float, verdict: Verdict) -> None:
    gate = gates(traffic(Random(1), 120, requests=40, tpot=factor))["tpot"]
    assert gate.verdict is verdict
    assert gate.estimate == pytest.approx(factor, rel=0.02)
    assert gate.low is not None
    assert gate.high is not None
    assert gate.low < factor < gate.high


def test_a_quantile_is_compared_within_strata() -> None:
    worse = gates(traffic(Random(2), 150, requests=40, tpot=1.4))["tpot_p95"]
    assert worse.verdict is Verdict.WORSE
    assert worse.low is not None
    assert 1.1 <= worse.low < 1.4
    equal = gates(traffic(Random(2), 150, requests=40))["tpot_p95"]
    assert equal.verdict is not Verdict.WORSE
    assert equal.estimate == pytest.approx(1.0, abs=0.06)


def test_gates_of_what_nobody_measures_are_left_out() -> None:
    assert set(gates(traffic(Random(1), 10))) == {"tpot", "tpot_p95", "errors"}


def test_errors_of_every_request_are_worse_within_one_block() -> None:
    gate = gates(traffic(Random(1), 1, requests=15, errors=1.0))["errors"]
    assert gate.verdict is Verdict.WORSE
    assert (gate.old_value, gate.new_value) == (0.0, 1.0)


def test_pairs_are_preferred_to_copies_in_a_shadow_step() -> None:
    copies = traffic(Random(1), 60, arms=(Arm.OLD_COPY, Arm.NEW_COPY), tpot=1.0)
    source = Random(2)
    for one in copies:
        ratios = [log(1.3) + source.gauss(0.0, 0.1) for _ in range(5)]
        one.cells += block(0.0, [(CellKey(Metric.TPOT, Arm.PAIR), ratios)]).cells
    assert gates(copies, SHADOW)["tpot"].estimate == pytest.approx(1.3, rel=0.02)


def test_copies_are_compared_with_copies_and_clients_with_clients() -> None:
    clients = traffic(Random(1), 60, tpot=1.5)
    assert "tpot" not in gates(clients, SHADOW)
    assert gates(clients)["tpot"].verdict is Verdict.WORSE


def test_answers_that_differ_are_held_against_the_old_versions_own() -> None:
    """At a high temperature no version agrees with itself."""
    source = Random(3)

    def blocks(old: float, new: float) -> list[Block]:
        return [
            block(
                BEGAN + n * BLOCK_S,
                [
                    (CellKey(Metric.DISAGREEMENT, Arm.OLD_COPY), [float(source.random() < old) for _ in range(10)]),
                    (CellKey(Metric.DISAGREEMENT, Arm.NEW_COPY), [float(source.random() < new) for _ in range(10)]),
                ],
            )
            for n in range(120)
        ]

    assert gates(blocks(0.5, 0.5), SHADOW)["disagreement"].verdict is Verdict.UNDECIDED
    assert gates(blocks(0.5, 0.7), SHADOW)["disagreement"].verdict is Verdict.WORSE
    assert gates(blocks(0.0, 0.2), SHADOW)["disagreement"].verdict is Verdict.WORSE


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_lengths_of_answers_are_judged_on_both_sides(factor: float) -> None:
    source = Random(4)
    blocks = [
        block(
            BEGAN + n * BLOCK_S,
            [(CellKey(Metric.OUTPUT_TOKENS, Arm.PAIR), [log(factor) + source.gauss(0.0, 0.3) for _ in range(8)])],
        )
        for n in range(60)
    ]
    assert gates(blocks, SHADOW)["output_tokens"].verdict is Verdict.WORSE


def test_one_tenants_regression_is_found_beside_an_equal_mean() -> None:
    hurt = traffic(Random(5), 120, requests=10, tpot=1.4, tenant="acme")
    fine = traffic(Random(6), 120, requests=400, tpot=1.0, gateway="g2")
    for one in hurt:  # all tenants' cells have those of every tenant
        one.cells = [(key, cell) for key, cell in one.cells if key.tenant or key.metric is Metric.ERRORS]
    found = gates([*(b for both in zip(hurt, fine, strict=True) for b in both)])
    assert found["tpot"].verdict is Verdict.EQUAL
    assert found["tpot/acme"].verdict is Verdict.WORSE
    assert found["tpot/acme"].alpha < found["tpot"].alpha


def test_all_clients_errors_are_held_against_those_that_the_old_version_had() -> None:
    before = traffic(Random(7), 60, requests=40)
    after = traffic(Random(8), 60, requests=40, errors=0.05, step=1, first=60)
    for one in after:
        one.cells = [(key, cell) for key, cell in one.cells if key.arm is Arm.NEW]
    found = gates([*before, *after], step=1)
    assert found["errors"].verdict is Verdict.WORSE
    assert "tpot" not in found  # nobody to compare with


def test_the_probability_of_a_false_alarm_is_not_more_than_the_plans() -> None:
    for of in (CLIENTS, SHADOW, plan(), plan(tenants=0), plan(tenants=20)):
        one, tenants = alphas(of)
        with_tenants_ = [gate for gate in of.enabled_gates.values() if gate.tenants]
        comparisons = 1 + any(step.is_shadow for step in of.steps) + any((step.share or 1) < 1 for step in of.steps)
        spent = one * len(of.enabled_gates) * comparisons
        spent += tenants * len(with_tenants_) * of.tenants * len(of.steps)
        assert spent <= of.alpha * (1 + 1e-9)


def test_a_sentence_has_the_numbers_that_the_verdict_stands_on() -> None:
    gate = gates(traffic(Random(1), 120, requests=40, tpot=1.25))["tpot"]
    said = sentence(gate, "v1")
    assert said.startswith("TPOT 1.2")
    assert "of v1's over 4,800 and 4,800 requests, margin 1.03: worse" in said
    assert "errors" in sentence(gates(traffic(Random(1), 5))["errors"], "v1")
