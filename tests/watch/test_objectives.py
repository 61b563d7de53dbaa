import msgspec
import pytest

from penstock.core.slo import Objective, Slo
from penstock.watch.burn import BURN_RULES, Events, burning
from penstock.watch.kinds import Severity
from penstock.watch.objectives import ModelObjectives
from penstock.watch.quantiles import BOUNDS, NUM_BINS, bin_of, quantile


def spans(events: Events) -> dict[float, Events]:
    return {span: events for rule in BURN_RULES for span in (rule.long_s, rule.short_s)}


@pytest.mark.parametrize(
    ("bad", "severity", "factor"),
    [(145, Severity.PAGE, 14.4), (143, Severity.TICKET, 10.0), (99, Severity.TICKET, 6.0), (29, Severity.TICKET, 1.0)],
)
def test_the_most_urgent_rule_that_holds_is_the_one(bad: int, severity: Severity, factor: float) -> None:
    rule = burning(spans(Events(10_000 - bad, bad)), 0.001, covered_s=1e9)
    assert rule is not None
    assert (rule.severity, rule.factor) == (severity, factor)


def test_a_few_failures_burn_nothing_however_few_requests_there_are() -> None:
    assert burning(spans(Events(1, 9)), 0.001, covered_s=1e9) is None


def test_what_is_over_burns_no_more() -> None:
    windows = spans(Events(0, 1000)) | {300.0: Events(1000, 0), 1800.0: Events(1000, 0), 7200.0: Events(1000, 0)}
    windows[21600.0] = Events(1000, 0)
    assert burning(windows, 0.001, covered_s=1e9) is None


def test_a_bad_minute_after_a_start_is_not_three_bad_days() -> None:
    events = Events(9_900, 100)
    young = burning(spans(events), 0.002, covered_s=60.0)
    old = burning(spans(events), 0.002, covered_s=1e9)
    assert young is None
    assert old is not None


def test_quantiles_are_exact_where_targets_are() -> None:
    counts = [0] * NUM_BINS
    for part in (0.8, 1.0, 2.0):
        assert BOUNDS[bin_of(part)] == part
    counts[bin_of(0.7)], counts[bin_of(1.5)] = 95, 5
    found = quantile(counts, 0.95)
    assert found is not None
    assert 0.64 < found <= 0.72
    assert quantile([0] * NUM_BINS, 0.95) is None


def test_status_says_how_much_of_each_target_is_used() -> None:
    model = ModelObjectives("m", Slo(ttft_s=0.5), 0.0)
    for second in range(1, 601):
        for _ in range(10):
            model.ended(True, 0.45, 0.02, 2.0)
        model.ended(second % 100 != 0, None, None, 1.0)
        model.second(True)
        model.tick(float(second))
    status = model.status(600.0)
    found = {one.objective: one for one in status.objectives}
    assert status.state == "warning"
    assert (found["ttft"].state, found["latency"].state, found["errors"].state) == ("warning", "ok", "warning")
    assert found["ttft"].observed == pytest.approx(0.45, rel=0.1)
    assert found["errors"].bad == 6
    assert found["errors"].used == pytest.approx(6 / 6600 / 0.001)
    assert found["errors"].budget_left == pytest.approx(1 - 0.909 * 600 / (30 * 86400), abs=1e-4)
    assert found["availability"].compliance == 1.0
    msgspec.json.encode(status)


def test_what_was_never_measured_is_unknown() -> None:
    status = ModelObjectives("m", Slo(tpot_s=None), 0.0).status(10.0)
    assert status.state == "unknown"
    assert "tpot" not in {one.objective for one in status.objectives}
    assert all(one.compliance is None and one.budget_left is None for one in status.objectives)


def test_seconds_without_a_replica_are_weighed_against_the_whole_window() -> None:
    model = ModelObjectives("m", Slo(), 0.0)
    for second in range(1, 21):
        model.second(second <= 10)
        model.tick(float(second))
    assert model.last_hour(Objective.AVAILABILITY, 20.0) == Events(3590, 10)
