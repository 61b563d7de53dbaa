"""The console's fleet page in Chromium, at a real gateway over a store with a day of a fleet's history."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import CapacityType
from penstock.tenancy.fleet import FleetReplica, FleetSample, PoolStatus
from tests.cli.real_gateway import real_gateway
from tests.console.browser import chromium, contrast, is_too_wide, opened
from tests.console.test_browser import expect
from tests.fleet.managed import managed
from tests.server.replica import NAME, serving

pytestmark = pytest.mark.slow

NOW = time.time()
STATUS = PoolStatus(
    NAME,
    NOW,
    wanted=3,
    min=1,
    max=3,
    states={"active": 2, "starting": 1},
    bound="max",
    arrivals_per_s=6.5,
    forecast_p50=7.0,
    forecast_p90=9.0,
    cost_per_hour=6.0,
    durations={"start_s": 12.0},
    reason="6.5 requests/s, 2.1 per replica within the SLO: 4 needed",
)
OTHER = PoolStatus("another", NOW, wanted=0, states={}, start_failures=2, failure="no disk")
REPLICAS = (
    FleetReplica(
        "small-a",
        NAME,
        "active",
        NOW - 900,
        url="http://10.0.0.1:1",
        zone="a",
        price_per_hour=2.5,
        created_at=NOW - 900,
    ),
    FleetReplica(
        "small-b", NAME, "active", NOW - 60, capacity_type="spot", deadline=NOW + 90, price_per_hour=1.0, created_at=NOW
    ),
    FleetReplica("small-c", NAME, "starting", NOW - 8, created_at=NOW - 8, price_per_hour=2.5),
)


def history() -> Iterator[FleetSample]:
    for minute in range(24 * 60, 0, -1):
        at = NOW - 60 * minute
        rate = 5 + 4 * math.sin(at / 3600)
        active = max(1, round(rate / 3))
        yield FleetSample(
            at,
            NAME,
            {"active": active, "standby": 1},
            rate,
            forecast_p50=rate + 0.5,
            forecast_p90=rate + 2,
            wanted=active,
            cost=(active + 1) * 2.5 / 60,
            seconds={"active": 60.0 * active, "standby": 60.0},
        )


def decisions() -> Iterator[Decision]:
    for minutes, wanted in ((600, 1), (50, 2), (20, 3)):
        start = Action(ActionKind.START, f"{wanted} are wanted", zone="b", capacity_type=CapacityType.SPOT)
        reason = f"a rate of {wanted} requests/s"
        numbers = {"rate": 2.1 * wanted, "predicted_ttft_s": 0.4, "forecast_p50_66s": 7.0}
        yield Decision(NAME, NOW - 60 * minutes, wanted, actions=(start,), reason=reason, numbers=numbers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page_url(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        serving() as replica,
        real_gateway(tmp_path_factory.mktemp("fleet"), replica, level="error") as gateway,
        managed(
            gateway.store,
            STATUS,
            OTHER,
            replicas=REPLICAS,
            samples=tuple(history()),
            decisions=tuple(decisions()),
        ),
    ):
        yield f"{gateway.url}/#/fleet"


def choose(page: Any, pool: str) -> None:
    page.get_by_label("Pool").select_option(pool)


def test_pool_is_shown_with_its_size_demand_forecast_and_cost(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as page:
        choose(page, NAME)
        figures = page.get_by_role("region", name="Now")
        for name, value in (
            ("Active replicas", "2"),
            ("Wanted", "3"),
            ("Demand", "6.50"),
            ("Expected", "7"),
            ("Cost", "6.00"),
            ("Start, p95", "12 s"),
        ):
            expect(figures.locator(".figure", has_text=name).locator("b").first).to_have_text(value)
        expect(page.locator(".plot canvas")).to_have_count(3)
        expect(page.locator(".legend", has_text="standby").locator("li")).to_have_count(6)
        expect(
            page.get_by_role("img", name=re.compile("Replicas by state: active 2.*starting 1.*wanted 3"))
        ).to_be_visible()
        expect(page.get_by_role("img", name="expected, p90 9/s, expected, p50 7/s")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("Bound by max.")


def test_decision_says_why_at_its_mark_and_opens_below(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as page:
        choose(page, NAME)
        marks = page.locator(".marks button")
        expect(marks).to_have_count(2)  # of the last hour
        marks.last.hover()
        tip = page.get_by_role("tooltip")
        expect(tip).to_contain_text("2 → 3 wanted")
        expect(tip).to_contain_text("a rate of 3 requests/s")
        expect(tip.locator("dl div", has_text="TTFT predicted")).to_contain_text("400 ms")
        marks.last.click()
        opened_one = page.locator(".decision.open")
        expect(opened_one).to_contain_text("start a new replica in zone b on spot capacity: 3 are wanted")
        expect(opened_one.locator("dl div", has_text="expected in 66 s, p50")).to_contain_text("7/s")
        page.get_by_role("button", name="24 h").click()
        expect(marks).to_have_count(3)


def test_replicas_are_listed_with_state_zone_capacity_age_and_price(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as page:
        choose(page, NAME)
        rows = page.get_by_role("table", name="Fleet replicas").locator("tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("10.0.0.1:1")
        expect(rows.nth(0)).to_contain_text("2.50")
        expect(rows.nth(1)).to_contain_text("spot")
        expect(rows.nth(1)).to_contain_text("gone in")
        expect(rows.nth(2)).to_contain_text("to active")


def test_pool_whose_starts_fail_says_so_and_another_is_chosen(browser: Any, page_url: str) -> None:
    with opened(browser, page_url) as page:
        choose(page, "another")
        expect(page.get_by_role("alert")).to_contain_text(re.compile(r"2 starts in a row have failed\..*no disk"))
        expect(page.locator(".empty", has_text="No replicas")).to_be_visible()


def test_page_fits_a_phone_and_is_read_in_the_dark(browser: Any, page_url: str) -> None:
    with opened(browser, page_url, width=375, height=700, is_touch=True, is_dark=True) as page:
        choose(page, NAME)
        expect(page.locator(".marks button")).to_have_count(2)
        assert not is_too_wide(page)
        for selector in (".reason", ".legend", ".decision .why", ".mark-of.up", ".size.up"):
            assert contrast(page, selector) >= 4.5, selector


def test_without_a_fleet_the_page_says_how_to_start_one(browser: Any, tmp_path: Path) -> None:
    with serving() as replica, real_gateway(tmp_path, replica, level="error") as gateway:
        with opened(browser, f"{gateway.url}/#/fleet") as page:
            expect(page.locator(".empty")).to_contain_text("No fleet")
            expect(page.locator("code", has_text="penstock serve smollm2 --replicas 1..4")).to_be_visible()
        with managed(gateway.store, STATUS), opened(browser, f"{gateway.url}/#/fleet") as page:
            expect(page.locator(".figure", has_text="Wanted")).to_be_visible()
