"""Simulated rollouts: regressions are found, and an equal version is promoted."""

from __future__ import annotations

import pytest

from penstock.core.slo import Slo
from penstock.rollout.policy.plan import default_plan, plan_from
from penstock.rollout.policy.state import Phase
from penstock.sim.rollout.report import REGRESSIONS, clopper_pearson, markdown, simulate, summarise
from penstock.sim.rollout.run import run_rollout
from penstock.sim.rollout.traffic import Regression, Traffic, World

SMALL = World(requests_per_s=12.0, sessions=300)
PLAN = default_plan(Slo())


@pytest.mark.parametrize("name", ["tpot+25%", "ttft+25%", "errors+50%"])
def test_a_large_regression_is_found_before_a_client_is_served(name: str) -> None:
    outcome = run_rollout(1, REGRESSIONS[name], PLAN, SMALL)
    assert outcome.phase is Phase.ABORTED
    assert outcome.exposed == 0
    assert outcome.gates[0].startswith(name.partition("+")[0])


def test_an_equal_version_is_promoted() -> None:
    short = [{"shadow": 0.2, "min_s": 60, "max_s": 60}, {"share": 0.5, "min_s": 120, "max_s": 120}, {"share": 1}]
    plan = plan_from({"steps": [short[0], short[1], {"share": 1, "min_s": 60, "max_s": 60}], "hold_s": 120}, Slo())
    outcome = run_rollout(2, Regression(), plan, SMALL)
    assert outcome.phase is Phase.PROMOTED
    assert outcome.exposed > 1000


def test_a_version_whose_errors_show_in_the_hold_is_aborted_there() -> None:
    steps = [{"share": 0.05, "min_s": 300, "max_s": 300}, {"share": 1, "min_s": 60, "max_s": 60}]
    plan = plan_from({"steps": steps, "hold_s": 600, "gates": {"errors": {"margin": 0.005}}}, Slo())
    outcome = run_rollout(1, Regression(errors=0.015), plan, SMALL)
    assert (outcome.phase, outcome.gates) == (Phase.ABORTED, ("errors",))
    assert "holding" in [entry.what for entry in outcome.story]


def test_a_run_is_the_same_each_time() -> None:
    first, second = (run_rollout(3, REGRESSIONS["tpot+25%"], PLAN, SMALL) for _ in range(2))
    assert first == second


def test_blocks_have_what_gateways_write() -> None:
    traffic = Traffic(1, Regression(), SMALL)
    copies = traffic.minute(0.0, 0, PLAN.steps[0])
    clients = traffic.minute(60.0, 1, PLAN.steps[3])
    assert {key.arm for block in copies for key, _ in block.cells} == {"old_copy", "new_copy", "pair"}
    assert {key.arm for block in clients for key, _ in block.cells} == {"old", "new"}
    counted = {key: cell for key, cell in clients[0].cells if key.metric == "tpot" and not key.tenant}
    assert all(key.stratum.startswith("f") for key in counted)
    assert all(sum(cell.bins.values()) == cell.count for cell in counted.values())


def test_the_table_has_a_row_for_each_regression() -> None:
    summaries = summarise(simulate([REGRESSIONS["tpot+25%"]], range(2), PLAN, SMALL))
    assert (summaries[0].runs, summaries[0].aborted_share, summaries[0].steps) == (2, 1.0, {1: 2})
    assert "| tpot+25% | 2 | 100.0% |" in markdown(summaries)


def test_the_upper_bound_of_no_hit_in_a_thousand_is_three_in_a_thousand() -> None:
    assert clopper_pearson(0, 1000) == pytest.approx(0.003, rel=0.01)
    assert clopper_pearson(5, 5) == 1.0
