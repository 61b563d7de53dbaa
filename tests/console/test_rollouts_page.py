"""The console's page of rollouts in Chromium, at a real gateway whose store has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from penstock.core.errors import Conflict
from penstock.rollout.desk import start_rollout
from penstock.rollout.policy.state import GateResult, Phase, StoryEntry, Verdict
from penstock.rollout.runner import state_of
from penstock.tenancy.rollouts import Rollout
from penstock.tenancy.routes import SharesAsked
from penstock.tenancy.store import open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.console.browser import chromium, is_too_wide, opened
from tests.console.test_browser import expect
from tests.gateway.provider import providing
from tests.waiting import eventually

pytestmark = pytest.mark.slow

GATES = [
    GateResult("tpot", Verdict.EQUAL, 0.03, 1e-4, "", 1.004, 0.991, 1.018, 840, 810, method="mixture t-test"),
    GateResult("errors", Verdict.UNDECIDED, 0.001, 1e-4, "", 0.0004, -0.002, 0.003, 840, 810, is_ratio=False),
    GateResult("ttft_p95", Verdict.BETTER, 0.1, 1e-4, "", 0.91, 0.84, 0.99, 840, 810),
    GateResult("latency", Verdict.WORSE, 0.05, 1e-4, "acme", 1.31, 1.2, 1.44, 84, 81),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with providing() as one, providing() as two:
        versions = {"v1": {"replicas": [one.url], "weight": 100}, "v2": {"replicas": [two.url], "weight": 0}}
        models = {"chat": {"versions": versions}}
        with real_gateway(tmp_path_factory.mktemp("rollouts"), models=models, request_log=False) as found:
            yield found


@pytest.fixture(scope="module")
def rollout(gateway: RealGateway) -> Rollout:
    """Paused in its second step, so that nobody moves it on."""
    with open_store(gateway.store) as store:
        begun = start_rollout(store, "chat", "v2", by="root")
        at = begun.started_at
        state = replace(
            state_of(begun),
            phase=Phase.PAUSED,
            step=1,
            step_in_force=1,
            since=at,
            reason="paused: root ordered it",
        )
        paused = replace(
            begun,
            state=Raw(msgspec.json.encode(state)),
            phase=str(state.phase),
            gates=Raw(msgspec.json.encode(GATES)),
            order=replace(begun.order, step=1),
        )
        story = [
            StoryEntry(at + 1, "step", "step 1, shadow 0.05: no gate finds a difference", Phase.WAITING, 1, "", GATES),
            StoryEntry(at + 2, "paused", state.reason, Phase.PAUSED, 1, "root"),
        ]
        while True:
            try:
                return store.rollouts.change(
                    paused, story, shares=SharesAsked({"v1": 99.0, "v2": 1.0}), action="rollout: 1 %"
                )
            except Conflict:  # the gateway's runner was faster
                paused = replace(paused, revision=store.rollouts.get(begun.id).revision)


def test_steps_gates_and_story_are_shown(browser: Any, gateway: RealGateway, rollout: Rollout) -> None:
    with opened(browser, f"{gateway.url}/#/rollouts") as page:
        expect(page.get_by_role("region", name="chat: v1 → v2")).to_contain_text("paused: root ordered it")
        steps = page.get_by_role("list", name="Steps").get_by_role("listitem")
        expect(steps).to_have_count(6)
        expect(page.locator(".rollout-steps [aria-current=step]")).to_contain_text("1 %")
        gates = page.get_by_role("region", name="Gates").locator("li")
        expect(gates).to_have_count(4)
        expect(gates.first).to_contain_text("latency of acme")  # the worst first
        expect(gates.first).to_contain_text("1.31 × [1.20, 1.44]")
        story = page.get_by_role("region", name="Story")
        expect(story.locator(".entry")).to_have_count(3)
        expect(story).to_contain_text("no gate finds a difference")
        assert not is_too_wide(page)
    with opened(browser, f"{gateway.url}/#/rollouts", width=390, is_touch=True) as page:
        expect(page.get_by_role("region", name="Gates")).to_be_visible()
        assert not is_too_wide(page)


def test_an_abort_is_asked_about_and_then_ordered(browser: Any, gateway: RealGateway, rollout: Rollout) -> None:
    with opened(browser, f"{gateway.url}/#/rollouts") as page, open_store(gateway.store) as store:
        page.get_by_role("button", name="Abort").click()
        dialog = page.get_by_role("dialog", name="Back to v1?")
        expect(dialog).to_be_visible()
        assert store.routes.show("chat").weights["v2"] == 1.0
        dialog.get_by_role("button", name="Abort").click()
        expect(dialog).not_to_be_visible()
        eventually(lambda: store.routes.show("chat").weights["v2"] == 0.0)
        expect(page.get_by_role("region", name="chat: v1 → v2")).to_contain_text("aborted")
