from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.objective import Objective
from penstock.bench.page import page
from penstock.bench.point import Point, make_point
from penstock.bench.serve import Report
from penstock.bench.serve_text import as_text
from penstock.page.plot import Limit, Line, Plot, svg
from tests.bench.test_point import answered, failed, run

SLO = Objective.parse("ttft=0.2,tpot=0.05")


def point(load: float, ttft_s: float) -> Point:
    results = [answered(0.1 * number, ttft_s * (1 + number / 50), 0.02) for number in range(50)]
    return make_point(f"concurrency {load:g}", load, run(*results, failed("http_429")), SLO)


def report(*points: Point, model: str = "m") -> Report:
    return Report(
        kind="serve",
        command="penstock bench serve --url http://h",
        date="2026-01-02",
        url="http://h",
        model=model,
        endpoint="chat",
        workload="words",
        tokenizer="none",
        seed="1",
        slo=SLO,
        machine="a CPU",
        versions={"penstock": "1"},
        notes=["a note"],
        points=list(points),
    )


def test_tables_fit_a_hundred_columns() -> None:
    busy = [replace(point(load, 0.1), num_requests=12_345, requests_per_s=1234.56) for load in (1, 128)]
    fast = [replace(one, output_tokens_per_s=123_456.0, total_tokens_per_s=1_234_567.0) for one in busy]
    rows = [line for line in as_text(report(*fast)).splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 100


@pytest.mark.parametrize("points", [[point(1, 0.1)], [point(1, 0.1), point(2, 0.3)], []])
def test_a_page_is_whole_and_loads_nothing(points: list[Point]) -> None:
    text = page(report(*points))
    assert re.findall(r"<(script|link|img|iframe)|\bsrc=|@import|url\(", text) == []
    assert text.count("<svg") == text.count("</svg>") == (4 if len(points) == 1 else 8 if points else 0)
    for drawn in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in text


def test_what_others_say_is_shown_and_never_run() -> None:
    bad = replace(point(1, 0.1), examples={"http_429": "<script>alert(1)</script>"})
    text = page(report(bad, model='"><b>'))
    assert "<script" not in text
    assert '"><b>' not in text
    assert "&lt;script&gt;" in text


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=20),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1e6),
)
def test_every_plot_stays_within_its_frame(
    places: list[tuple[float, float]], is_log_x: bool, is_log_y: bool, limit: float
) -> None:
    line = Line("<a & b>", [x for x, _ in places], [y for _, y in places], is_dots=True)
    plot = Plot("t", "x", "y", [line], [Limit("l", limit), Limit("u", limit, is_upright=True)], is_log_x, is_log_y)
    drawn = ElementTree.fromstring(svg(plot))
    for circle in drawn.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 560
        assert 0 <= float(circle.attrib["cy"]) <= 300


def test_the_text_has_every_figure_of_every_load_and_what_stands_against_them() -> None:
    text = as_text(report(point(1, 0.1), point(2, 0.3)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["concurrency 2", "TPOT", "20.0", "20.0", "20.0", "20.0"] in rows
    assert next(row for row in rows if row[0] == "concurrency 1")[1:3] == ["51", "1"]
    assert "! concurrency 2: 1 of 51 failed, http_429: a http_429" in text
    assert "- a note" in text
    assert "SLO: TTFT ≤ 200 ms, TPOT ≤ 50 ms" in text
