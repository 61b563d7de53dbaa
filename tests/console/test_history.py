from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.history import ALL, COLUMNS, Backlog, History, Row
from penstock.gateway.records.facts import Ending, RequestFacts

ENDINGS = {"ok": Ending.OK, "refused": Ending.REFUSED, "failed": Ending.FAILED, "gone": Ending.CLIENT_GONE}


def facts(model: str = "m", **values: object) -> RequestFacts:
    return RequestFacts("id", "chat", **{"ending": Ending.OK, "model": model, **values})  # type: ignore[arg-type]


def named(row: Row) -> dict[str, float | None]:
    return dict(zip(COLUMNS, row, strict=True))


@given(st.lists(st.floats(1e-4, 100), min_size=1, max_size=80), st.sampled_from([("p50", 0.5), ("p95", 0.95)]))
def test_quantiles_are_within_two_percent(seconds: list[float], which: tuple[str, float]) -> None:
    history = History()
    for ttft_s in seconds:
        history.ended(facts(ttft_s=ttft_s, total_s=ttft_s))
    name, share = which
    found = named(history.close(1.0, {})["m"])[f"ttft_{name}"]
    assert found == pytest.approx(sorted(seconds)[ceil(share * len(seconds)) - 1], rel=0.02)


@given(st.lists(st.tuples(st.sampled_from(list(ENDINGS)), st.sampled_from([f"m{i}" for i in range(30)])), max_size=60))
def test_every_request_is_in_the_sum_once_however_many_models_there_are(ended: list[tuple[str, str]]) -> None:
    history = History()
    for ending, model in ended:
        history.ended(facts(model, ending=ENDINGS[ending], input_tokens=3))
    rows = history.close(1.0, {})
    found = named(rows[ALL])
    for name in ENDINGS:
        assert found[name] == sum(ending == name for ending, _ in ended)
    assert found["input_tokens"] == 3 * len(ended)
    assert len(rows) <= 17


def test_a_row_has_counts_whatever_the_time_that_passed() -> None:
    history = History()
    for _ in range(6):
        history.ended(facts(input_tokens=10, cached_tokens=4, output_tokens=20))
    row = named(history.close(1.0, {"m": Backlog(1, 2, 0.25, generated=100)})["m"])
    assert (row["ok"], row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (6, 60, 24, 220)
    assert (row["waiting"], row["running"], row["kv"]) == (1, 2, 0.25)


def test_output_that_a_replica_tells_of_is_not_counted_twice() -> None:
    history = History()
    history.ended(facts(output_tokens=20), counts_output=False)
    assert named(history.close(1.0, {"m": Backlog(generated=7)})["m"])["output_tokens"] == 7


def test_time_per_token_needs_a_stream_of_two_tokens_that_ended_well() -> None:
    history = History()
    history.ended(facts(ttft_s=0.1, total_s=1.1, output_tokens=11))
    history.ended(facts(ttft_s=0.1, total_s=9.0, output_tokens=1))
    history.ended(facts(ttft_s=0.1, total_s=9.0, output_tokens=2, ending=Ending.FAILED))
    history.ended(facts(total_s=9.0, output_tokens=5))
    assert named(history.close(1.0, {})["m"])["tpot_p95"] == pytest.approx(0.1, rel=0.02)


def test_a_quantile_is_forgotten_after_fifteen_seconds() -> None:
    history = History()
    history.ended(facts(ttft_s=0.5, total_s=1.0))
    found = [named(history.close(float(second), {})["m"])["ttft_p50"] for second in range(16)]
    assert all(found[:15])
    assert found[15] is None


def test_a_younger_model_has_the_last_rows_and_old_ones_go() -> None:
    history = History(seconds=5)
    for second in range(4):
        history.close(float(second), {"old": Backlog()})
    for second in range(4, 8):
        history.close(float(second), {"old": Backlog(), "new": Backlog(running=1)})
    columns = history.columns()
    assert list(history.times) == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert {model: len(columns[model][0]) for model in columns} == {ALL: 5, "old": 5, "new": 4}
