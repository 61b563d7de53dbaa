"""Pipelines in the console: the steps of a request, and counts of steps, at a real gateway and in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.console.pipelines import StepCounts
from penstock.gateway.records.trace import StepVisit
from penstock.tenancy.admins import new_admin_key
from tests.console.at_gateway import console
from tests.console.browser import chromium, is_too_wide, opened
from tests.gateway.pipelines.test_served import FOUR_CALLS, ask, num_open, serving
from tests.gateway.provider import providing
from tests.waiting import eventually


def visit(name: str, outcome: str = "ok", seconds: float = 1.0, **more: Any) -> StepVisit:
    return StepVisit(name, "model", "", "", 5.0, 5.0 + seconds, outcome, **more)


def test_steps_are_counted_by_pipeline_and_step() -> None:
    counts = StepCounts()
    counts.add("one", [visit("a", seconds=1.0, input_tokens=3, cost=0.5), visit("a", seconds=3.0, output_tokens=4)])
    counts.add("two", [visit("a", "failed"), visit("a", "timeout"), visit("a", "failed")])
    first, second = counts.rows()
    assert (first.pipeline, first.step, first.ok, first.mean_s, first.tokens, first.cost) == (
        "one",
        "a",
        2,
        2.0,
        7,
        0.5,
    )
    assert (second.pipeline, second.ok, second.mean_s, second.others) == ("two", 0, None, {"failed": 2, "timeout": 1})


def test_names_of_steps_are_bounded() -> None:
    counts = StepCounts()
    counts.add("one", [visit(f"step{number}") for number in range(2000)])
    counts.add("one", [visit("step0")])
    assert len(counts.rows()) == 1000
    assert counts.rows()[0].ok == 2


def test_a_request_opens_into_its_steps_and_its_tokens_count_once(tmp_path: Path) -> None:
    admin = new_admin_key("root", now_s=0)
    with (
        providing() as provider,
        serving(tmp_path, FOUR_CALLS, provider) as gateway,
        console(gateway, admin.record) as page,
    ):
        key = gateway.add_tenant("acme")
        whole = ask(gateway, key)
        eventually(lambda: num_open(gateway) == 0)
        gateway.call(lambda: page.feed.tick(1.0))
        _, _, shown = page.get(f"/console/v1/requests/{whole.id.removeprefix('chatcmpl-')}", admin.secret)
        assert shown["request"]["num_steps"] == len(shown["steps"]) == 8
        of_models = [one for one in shown["steps"] if one["request"]]
        assert [one["name"] for one in of_models].count("each.step") == 2
        assert all(0 <= one["from_s"] <= one["to_s"] for one in shown["steps"])
        _, _, step = page.get(f"/console/v1/requests/{of_models[0]['request']}", admin.secret)
        assert step["request"]["step_of"] == shown["request"]["id"]
        with page.events(admin.secret) as events:
            _, hello = next(events)
        (tenant,) = (one for one in hello["state"]["tenants"] if one["id"] == "acme")
        assert (tenant["requests"], tenant["input_tokens"], tenant["output_tokens"]) == (1, 12, 4)
        assert sum(one["ok"] for one in hello["state"]["steps"]) == 8
        columns = dict(zip(hello["columns"], hello["series"][""], strict=True))
        assert (columns["input_tokens"], columns["output_tokens"]) == ([12], [4])


@pytest.mark.slow
def test_the_page_shows_steps(tmp_path: Path) -> None:
    text = """
        name: asked
        steps:
          question: {template: "Answer shortly: {{ input.text }}"}
          answer: {model: small, prompt: "{{ question }}", fallback: {model: large, prompt: "{{ question }}"}}
    """
    with (
        chromium() as browser,
        providing(status=404) as broken,
        providing() as well,
        serving(tmp_path, text, broken, well) as gateway,
        console(gateway) as site,
    ):
        whole = ask(gateway)
        well.status = 404
        with pytest.raises(openai.APIStatusError):
            ask(gateway)
        eventually(lambda: num_open(gateway) == 0)
        gateway.call(site.feed.start)
        with opened(browser, f"http://127.0.0.1:{site.port}/#/requests") as page:
            table = page.get_by_role("table", name="Steps of pipelines")
            table.get_by_text("answer.fallback").wait_for()
            assert "2 failed" in table.inner_text()
            page.goto(f"http://127.0.0.1:{site.port}/#/requests/{whole.id.removeprefix('chatcmpl-')}")
            steps = page.get_by_role("list", name="Steps")
            steps.get_by_text("answer.fallback").wait_for()
            assert [one.split("\n")[0] for one in steps.get_by_role("listitem").all_inner_texts()] == [
                "question",
                "answer",
                "answer.fallback",
            ]
            assert not is_too_wide(page)
            page.screenshot(path=str(tmp_path / "steps.png"))
            steps.get_by_role("link", name="large").click()
            page.get_by_text("Step of").wait_for()
