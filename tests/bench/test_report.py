from __future__ import annotations

import dataclasses

import pytest

from penstock.bench.lag import GeneratorHealth
from penstock.bench.load import Result, Run
from penstock.bench.measurement import Measurement, measurement
from penstock.bench.report import Report, ServerFacts, markdown, notes, replace_section
from penstock.bench.workloads import Workload
from penstock.core.errors import ConfigError

TINY = Workload("tiny", prompt_tokens=4, output_tokens=8, concurrency=1, num_requests=1)


def measured(server: str, wall_s: float, *, foreign_cpu: float = 0.0, failures: tuple[str, ...] = ()) -> Measurement:
    results = [Result(0, 0, 0.0, 0.0, 1.0, 8, first_s=0.25, last_s=0.3375, prompt_tokens=4, output_tokens=8)]
    results += [Result(0, 0, 0.0, 0.0, 1.0, 8, error=failure) for failure in failures]
    run = Run(wall_s, wall_s, results, GeneratorHealth(0.0, None, None), len(results))
    return measurement(server, "tiny", 0, run, client_cpu=0.0, foreign_cpu=foreign_cpu)


def report(*measurements: Measurement) -> Report:
    names = dict.fromkeys(one.server for one in measurements)
    return Report(
        command="penstock bench cpu",
        date="2026-01-02",
        hardware="a CPU, 2 cores",
        versions={"penstock": "0.1"},
        seed="1",
        servers=[ServerFacts(name, 2.5, 300 << 20) for name in names],
        workloads=[TINY],
        measurements=list(measurements),
    )


def cells(text: str, *, first: str, second: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return next(row for row in rows if row[:2] == [first, second])


def test_a_row_shows_rates_and_milliseconds_and_the_ratio_to_the_best_peer() -> None:
    text = markdown(report(measured("penstock", 0.1), measured("slow", 0.8), measured("quick", 0.2)))
    expected = ["tiny", "penstock", "80", "80–80", "250 / 250", "12.5", "2.00"]
    assert cells(text, first="tiny", second="penstock") == expected
    assert cells(text, first="tiny", second="slow")[-1] == ""
    assert cells(text, first="quick", second="2.5") == ["quick", "2.5", "300"]


def test_the_table_fits_a_hundred_columns() -> None:
    taken = [measured(server, 1e-4, foreign_cpu=0.5) for server in ("penstock", "llama.cpp (native build)")]
    times = {"ttft_p50_s": 8.613, "ttft_p99_s": 34.467, "tpot_p50_s": 0.2019}
    slow = [dataclasses.replace(one, output_tok_s=9831.0, **times) for one in taken]
    rows = [line for line in markdown(report(*slow)).splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 100


def test_without_a_peer_there_is_no_ratio() -> None:
    assert cells(markdown(report(measured("penstock", 0.1))), first="tiny", second="penstock")[-1] == ""


def test_a_report_names_its_command_hardware_date_and_versions() -> None:
    text = markdown(report(measured("penstock", 0.1)))
    for fact in ("    penstock bench cpu\n", "2026-01-02", "a CPU, 2 cores", "penstock 0.1"):
        assert fact in text


def test_a_busy_machine_gives_no_ratio_but_a_note() -> None:
    busy = report(measured("penstock", 0.1), measured("peer", 0.4, foreign_cpu=0.3))
    assert cells(markdown(busy), first="tiny", second="penstock")[-1] == "(noisy)"
    assert list(notes(busy)) == ["peer, tiny, round 1: others used 30% of the machine"]


def test_failures_and_wrong_token_counts_are_noted() -> None:
    short = dataclasses.replace(measured("peer", 0.4), output_tokens=5)
    (failed, wrong) = notes(report(measured("penstock", 0.1, failures=("503 busy",)), short))
    assert failed == "penstock, tiny, round 1: 1 request(s) failed, the first with: 503 busy"
    assert wrong == "peer, tiny, round 1: 5 output tokens instead of 8"


def test_a_clean_report_has_no_notes() -> None:
    assert list(notes(report(measured("penstock", 0.1)))) == []


def test_a_section_is_replaced_and_the_rest_is_left_alone() -> None:
    document = "# Title\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\ntail\n"
    once = replace_section(document, "cpu", "new")
    assert once == "# Title\n<!-- bench:cpu -->\n\nnew\n\n<!-- /bench:cpu -->\ntail\n"
    assert replace_section(once, "cpu", "new") == once


@pytest.mark.parametrize("document", ["", "<!-- bench:cpu -->", "<!-- /bench:cpu --> <!-- bench:cpu -->"])
def test_a_document_without_markers_is_refused(document: str) -> None:
    with pytest.raises(ConfigError, match="bench:cpu"):
        replace_section(document, "cpu", "new")
