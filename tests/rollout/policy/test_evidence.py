"""Evidence: the same from the same blocks, whatever their order, and again after a restart."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.rollout import BLOCK_S, Arm, Block, Cell, CellKey, Metric
from penstock.rollout.policy.evidence import LATE_S, Evidence
from penstock.rollout.policy.gates import evidence_for, judge
from penstock.rollout.policy.state import GateResult, Phase, RolloutState
from tests.rollout.policy.blocks import BEGAN, block, plan, started, traffic


def watched() -> RolloutState:
    return replace(started(plan(steps=[{"share": 0.5}, {"share": 1}])), phase=Phase.WATCHING, step_in_force=0)


def folded(blocks: list[Block], *, until: float | None = None) -> Evidence:
    evidence = evidence_for(watched())
    for one in blocks:
        evidence.add(one)
    if until is not None:
        evidence.close(until)
    return evidence


def verdicts(evidence: Evidence) -> list[GateResult]:
    return judge(watched(), evidence)


def two_gateways(seed: int, windows: int) -> list[Block]:
    source = Random(seed)
    first = traffic(source, windows, requests=10, tpot=1.1, errors=0.01, gateway="a", tenant="acme")
    second = traffic(source, windows, requests=6, tpot=1.1, errors=0.01, gateway="b")
    return [one for both in zip(first, second, strict=True) for one in both]


@given(st.integers(0, 10_000))
def test_the_order_of_blocks_and_gateways_does_not_matter(seed: int) -> None:
    blocks = two_gateways(5, 12)
    mixed: list[Block] = []
    rest = list(blocks)
    source = Random(seed)
    while rest:  # no block comes later than a block is waited for
        near = [one for one in rest if one.at < rest[0].at + LATE_S]
        chosen = source.choice(near)
        rest.remove(chosen)
        mixed.append(chosen)
    until = BEGAN + 12 * BLOCK_S + LATE_S
    assert verdicts(folded(mixed, until=until)) == verdicts(folded(blocks, until=until))


def test_a_restart_folds_the_same() -> None:
    blocks = two_gateways(6, 40)
    running = evidence_for(watched())
    for one in blocks:
        running.add(one)
        running.close(one.at + 7.0)  # as the runner does, once a second
    until = BEGAN + 40 * BLOCK_S + LATE_S
    running.close(until)
    assert running.late_blocks == 0
    assert verdicts(running) == verdicts(folded(blocks, until=until))


def test_times_of_late_blocks_are_left_out_and_their_errors_are_counted() -> None:
    blocks = two_gateways(7, 10)
    evidence = folded(blocks)
    before = verdicts(evidence)
    evidence.add(blocks[0])
    assert evidence.late_blocks == 1
    after = verdicts(evidence)
    assert [gate for gate in after if gate.gate != "errors"] == [gate for gate in before if gate.gate != "errors"]
    errors = [next(gate for gate in found if gate.gate == "errors") for found in (before, after)]
    assert [gate.new_count for gate in errors] == [160, 170]


def test_windows_are_closed_by_time_too() -> None:
    evidence = folded(traffic(Random(1), 2))
    assert ("tpot", "") not in evidence.clients.means
    evidence.close(BEGAN + 2 * BLOCK_S + LATE_S)
    assert evidence.clients.means[Metric.TPOT, ""].test.windows == 2


def test_counts_are_there_at_once() -> None:
    evidence = folded([block(BEGAN, [(CellKey(Metric.ERRORS, Arm.NEW), [1.0, 1.0, 0.0])])])
    assert evidence.counts(0, Metric.ERRORS, Arm.NEW) == (2.0, 3)
    assert evidence.new_requests(0) == 3


def test_sums_of_shares_are_possible_ones_whatever_gateways_wrote() -> None:
    evidence = folded([])
    key = CellKey(Metric.COMPLAINTS, Arm.NEW)
    for at, cell in ((0.0, Cell(1, -0.5, 0.0)), (5.0, Cell(-3, 1.0, 1.0))):
        evidence.add(Block("r1", 0, "g", BEGAN + at, BLOCK_S, [(key, cell)]))
    assert evidence.counts(0, Metric.COMPLAINTS, Arm.NEW) == (0.0, 1)
    verdicts(evidence)
    evidence.add(Block("r1", 0, "g", BEGAN + 10.0, BLOCK_S, [(key, Cell(1, 7.0, 49.0))]))
    assert evidence.counts(0, Metric.COMPLAINTS, Arm.NEW) == (2, 2)


def test_errors_of_a_gateway_whose_clock_is_behind_are_counted() -> None:
    evidence = folded(traffic(Random(1), 20, requests=10))
    late = block(BEGAN, [(CellKey(Metric.ERRORS, Arm.NEW), [1.0] * 5)], gateway="slow")
    evidence.add(late, BEGAN + 100.0)
    assert evidence.counts(0, Metric.ERRORS, Arm.NEW) == (5.0, 205)


def test_a_gateway_whose_clock_is_ahead_costs_the_others_nothing() -> None:
    slow, fast, both = evidence_for(watched()), evidence_for(watched()), two_gateways(6, 40)
    for one in both:
        now = one.at + BLOCK_S
        slow.add(one, now)
        fast.add(replace(one, at=one.at + 3600.0) if one.gateway == "b" else one, now)
    for evidence in (slow, fast):
        evidence.close(BEGAN + 1000.0)
        assert evidence.late_blocks == 0
    assert evidence.clients.means[Metric.TPOT, ""].new_count == 40 * 16
    assert [gate.new_count for gate in verdicts(fast)] == [gate.new_count for gate in verdicts(slow)]


def test_other_rollouts_blocks_are_left_out() -> None:
    other = traffic(Random(1), 1)[0]
    other.rollout = "r2"
    assert folded([other]).new_requests(0) == 0


def test_thin_windows_are_joined_until_they_say_something() -> None:
    evidence = folded(traffic(Random(1), 12, requests=2), until=BEGAN + 500)
    assert evidence.clients.means[Metric.TPOT, ""].test.windows == 3  # a weight of 1 each, and 4 are needed


def test_strata_that_only_one_version_has_are_not_compared() -> None:
    values = [
        (CellKey(Metric.TTFT, Arm.OLD, "p1f1"), [0.0] * 20),
        (CellKey(Metric.TTFT, Arm.NEW, "p9f1"), [3.0] * 20),
    ]
    evidence = folded([block(BEGAN + n * BLOCK_S, values) for n in range(30)], until=BEGAN + 500)
    assert evidence.clients.means[Metric.TTFT, ""].test.windows == 0


def test_memory_is_bounded_by_windows_that_are_open_and_tenants_that_are_known() -> None:
    evidence = evidence_for(watched())
    for number, one in enumerate(traffic(Random(1), 200, requests=1)):
        one.cells.append(
            (
                CellKey(Metric.ERRORS, Arm.NEW, "", f"tenant-{number}"),
                block(0.0, [(one.cells[0][0], [0.0])]).cells[0][1],
            )
        )
        evidence.add(one)
    assert len(evidence._windows) <= 5
    assert len(evidence.largest_tenants(0, 1000)) == 64
