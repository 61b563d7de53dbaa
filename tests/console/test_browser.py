"""The page in Chromium, at a real gateway with real traffic, in front of replicas that are real but for the model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.tenancy.store import open_store
from tests.cli.real_gateway import real_gateway
from tests.console.at_gateway import Console
from tests.console.browser import chromium, contrast, is_too_wide, opened
from tests.console.test_at_replica import consoled
from tests.sdk import Unverified
from tests.server.replica import NAME, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

PAGES = ("overview", "fleet", "requests", "routing", "tenants", "alerts", "playground")
ROOT = Path(__file__).parents[2]
STORY = "Tell me a long story about river 18."  # to which the fake model has an answer of 2,573 tokens
LONG = "You answer questions about waterworks, turbines and pipes. " * 20


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def fleet(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway with two replicas that is in use for as long as the tests last."""
    with (
        serving(step_s=0.01, num_blocks=512, block_size=16, routing_tokens=64) as one,
        serving(step_s=0.01, num_blocks=512, block_size=16, routing_tokens=64) as two,
        real_gateway(tmp_path_factory.mktemp("fleet"), one, two, level="warning") as gateway,
        used(gateway.url, NAME),
    ):
        yield gateway.url


@pytest.fixture(scope="module")
def single() -> Iterator[Console]:
    """The console of a replica that nobody stands in front of."""
    with consoled(period_s=0.5) as (_, found):
        yield found


@pytest.mark.drill
def test_serve_with_replicas_has_the_page(browser: Any, tmp_path: Path) -> None:
    """With the real model, as a user starts it."""
    words = [sys.executable, "-m", "penstock.cli.main", "serve", "smollm2", "--replicas", "2", "--port", "0"]
    environment = os.environ | {"PENSTOCK_STORE": f"sqlite:///{tmp_path / 'tenants.db'}"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert found is not None
        eventually(lambda: _is_ready(found.group()), within_s=300)
        with used(found.group(), "smollm2"), opened(browser, found.group()) as page:
            expect(page.locator(".pill.good", has_text="ready")).to_have_count(2)
            expect(page.locator(".figure", has_text="TTFT p95").locator("b")).to_have_text(re.compile(r"\d"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(GIVE_UP_S)
        process.stdout.close()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=GIVE_UP_S):
        return True
    return False


@contextlib.contextmanager
def used(url: str, model: str) -> Iterator[None]:
    """Two users who ask for `model` over and over, and now and then for one that is not there."""
    stopped = threading.Event()
    users = [threading.Thread(target=_use, args=(url, model, number, stopped)) for number in range(2)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        stopped.set()
        for user in users:
            user.join()


def _use(url: str, model: str, number: int, stopped: threading.Event) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=Unverified())
    for turn in itertools.count():
        messages = [
            {"role": "system", "content": LONG},
            {"role": "user", "content": f"{number}.{turn}: what is water?"},
        ]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12, stream=True)  # type: ignore[arg-type]
        list(answer)
        if turn % 4 == 1:
            with contextlib.suppress(openai.NotFoundError):
                client.completions.create(model="nosuch", prompt="x")
        if stopped.wait(0.25):
            return


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expecting

    expecting.set_options(timeout=1e3 * GIVE_UP_S)
    return expecting(locator)


def test_the_overview_is_live(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        expect(page.locator(".live")).to_have_text("live")
        expect(page.locator(".plot canvas")).to_have_count(4)
        expect(page.locator(".figure", has_text="Requests").locator("b")).not_to_have_text("0")
        expect(page.locator(".figure", has_text="TTFT p95").locator("b")).to_have_text(re.compile(r"\d"))
        expect(page.get_by_role("table", name="Replicas").locator("tbody tr")).to_have_count(2)
        expect(page.locator(".pill.good", has_text="ready")).to_have_count(2)
        expect(page.locator(".queues dl > div")).to_have_count(3)
        page.get_by_role("button", name="15 min").click()
        expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")


def test_a_request_opens_with_its_waterfall_and_its_decision(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/requests") as page:
        page.get_by_role("button", name="Pause").click()
        page.get_by_label("Outcome").select_option("ok")
        row = page.get_by_role("table", name="Recent requests").locator("tbody tr").first
        row.focus()
        page.keyboard.press("Enter")
        inspector = page.locator(".inspector")
        for part in ("Tokenize", "Engine queue", "Prefill", "Decode", "Total"):
            expect(inspector.locator(".waterfall")).to_contain_text(part)
        expect(inspector.locator(".scores tr.picked")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(inspector).to_have_count(0)
        page.get_by_label("Outcome").select_option("refused")
        page.get_by_role("button", name="Go on").click()
        expect(page.locator("tbody .pill.warn").first).to_have_text("refused")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.keyboard.type("no such thing")
        expect(page.locator(".empty")).to_contain_text("Nothing fits")


def test_decisions_say_why(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/routing") as page:
        why = page.locator(".decision .why", has_text=re.compile(r"holds [\d,]+ of [\d,]+ prompt tokens")).first
        why.click()
        expect(page.locator(".scores table").first).to_contain_text("picked")
        expect(page.locator(".queues dl > div").first).to_contain_text("small")


def test_objectives_are_those_that_the_gateway_watches(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/alerts") as page:
        expect(page.get_by_role("heading", name="Objectives of small")).to_be_visible()
        expect(page.locator(".objective", has_text="First token")).to_contain_text("target 500 ms at p95")
        expect(page.locator(".objective", has_text="Availability")).to_contain_text("target 99.9 %")


def test_alerts_and_budgets_are_shown_in_the_form_that_docs_slo_gives(browser: Any, fleet: str) -> None:
    documents = re.findall(r"```json\n(.*?)```", (ROOT / "docs/slo.md").read_text(), re.DOTALL)
    slo, alerts = (json.loads(one) for one in documents[:2])
    with opened(browser, f"{fleet}/#/alerts") as page:
        page.route("**/admin/v1/slo", lambda route: route.fulfill(json=slo))
        page.route("**/admin/v1/alerts", lambda route: route.fulfill(json=alerts))
        page.reload()
        expect(page.locator("nav .badge")).to_have_text("1")
        expect(page.locator(".alerts li.firing")).to_contain_text(alerts["alerts"][0]["summary"])
        expect(page.locator(".objective").first).to_contain_text("80.6 % of the budget left")


def test_the_playground_streams_and_stops(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/playground") as page:
        page.get_by_label("Max tokens").fill("3000")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Prompt", exact=True).fill(STORY)
        page.keyboard.press("Enter")
        text = page.locator(".answer .text")
        expect(page.locator(".answer .ttft")).to_have_text(re.compile(r"\d"))
        before = len(text.inner_text())
        expect(text).to_have_text(re.compile(rf"[\s\S]{{{before + 10},}}"))
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
        expect(page.locator(".answer .speed")).to_have_text(re.compile(r"\d"))
        expect(page.locator(".answer footer")).to_contain_text("stopped")


def test_the_playground_compares_two(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/playground") as page:
        page.get_by_label("Compare two side by side").check()
        page.get_by_label("Max tokens").fill("16")
        page.get_by_label("Prompt", exact=True).fill("What is the capital of France?")
        page.get_by_role("button", name="Send").click()
        answers = page.locator(".answer[aria-busy=false]")
        expect(answers).to_have_count(2)
        for answer in answers.all():
            expect(answer.locator(".text")).to_have_text(re.compile(r"\w"))
            expect(answer.locator(".ttft")).to_have_text(re.compile(r"\d"))
            expect(answer.locator(".hint")).to_have_text(re.compile("small-"))
        boxes = [answer.bounding_box() for answer in answers.all()]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_keys_go_everywhere(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        expect(page.locator(".live")).to_have_text("live")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        for number, name in enumerate(PAGES, 1):
            page.keyboard.press(str(number))
            expect(page.locator("nav [aria-current]")).to_have_attribute("href", f"#/{name}")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()


@pytest.mark.parametrize("is_dark", [False, True])
def test_every_text_can_be_read_in_both_themes(browser: Any, fleet: str, is_dark: bool) -> None:
    with opened(browser, fleet, is_dark=is_dark) as page:
        expect(page.locator("html")).to_have_attribute("data-theme", "dark" if is_dark else "light")
        expect(page.locator(".pill.good").first).to_be_visible()
        for selector in ("h2", ".figure .name", ".figure b", ".hint", ".pill.good", "nav [aria-current]", "td small"):
            assert contrast(page, selector) >= 4.5, selector
        page.keyboard.press("t")
        expect(page.locator("html")).to_have_attribute("data-theme", "light" if is_dark else "dark")
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "light" if is_dark else "dark")


def test_on_a_phone_nothing_is_too_wide(browser: Any, fleet: str) -> None:
    with opened(browser, fleet, width=375, height=700, is_touch=True) as page:
        expect(page.locator(".live")).to_have_text("live")
        for name in PAGES:
            page.goto(f"{fleet}/#/{name}")
            expect(page.locator("nav [aria-current]")).to_be_in_viewport()
            assert not is_too_wide(page), name


def test_a_server_that_goes_and_comes_is_waited_for(browser: Any, single: Console) -> None:
    with opened(browser, f"http://127.0.0.1:{single.port}") as page:
        expect(page.locator(".live")).to_have_text("live")
        page.route("**/console/v1/session", lambda route: route.abort("connectionrefused"))
        single.loop.call_soon_threadsafe(lambda: [end() for end in single.feed._viewers.values()])  # streams end
        expect(page.locator(".live")).to_have_text("reconnecting")
        expect(page.get_by_role("alert")).to_contain_text("connection is lost")
        page.unroute("**/console/v1/session")
        expect(page.locator(".live")).to_have_text("live")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_an_admins_key_opens_it_and_names_are_shown_as_they_are_and_never_run(browser: Any, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    with serving() as replica, real_gateway(tmp_path, replica) as gateway:
        with open_store(gateway.store) as store:
            store.add_tenant({"id": "acme", "name": name})
            key, admin = store.create_key("acme").secret, store.admins.add("root").secret
        eventually(lambda: gateway.ask("GET", "/console/v1/session")[1]["needs_key"])
        with opened(browser, f"{gateway.url}/#/playground") as page:
            page.get_by_label("Admin key").fill("psa_0000000000_wrong")
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert")).to_contain_text("That did not work.")
            page.get_by_label("Admin key").fill(admin)
            page.keyboard.press("Enter")
            expect(page.locator(".live")).to_have_text("live")
            assert admin not in page.url
            page.get_by_label("Prompt", exact=True).fill("hello")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".answer .problem")).to_contain_text("API key")
            page.get_by_label("Tenant's key").fill(key)
            page.get_by_label("Prompt", exact=True).fill("<b>hello</b>")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".prompt").last).to_have_text("<b>hello</b>")
            expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false")
            page.keyboard.press("Escape")
            page.goto(f"{gateway.url}/#/tenants")
            expect(page.get_by_role("table", name="Tenants")).to_contain_text(name)
            page.reload()
            expect(page.locator(".live")).to_have_text("live")
            page.get_by_role("button", name="Sign out").click()
            expect(page.get_by_label("Admin key")).to_be_visible()
            page.reload()
            expect(page.get_by_label("Admin key")).to_be_visible()


def test_a_single_replica_has_the_same_page(browser: Any, single: Console) -> None:
    with opened(browser, f"http://127.0.0.1:{single.port}") as page:
        expect(page.locator(".live")).to_have_text("live")
        expect(page.locator(".swatch.target")).to_have_count(2)  # its own SLO
        for name in ("routing", "tenants", "alerts"):
            page.goto(f"http://127.0.0.1:{single.port}/#/{name}")
            expect(page.locator(".empty")).to_be_visible()
        page.goto(f"http://127.0.0.1:{single.port}/#/playground")
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Prompt", exact=True).fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".answer[aria-busy=false] footer")).to_contain_text("5 tokens")


def test_beyond_this_machine_a_single_replicas_console_says_why_it_is_closed(browser: Any) -> None:
    with (
        consoled(is_loopback=False, period_s=0.5) as (replica, _),
        opened(browser, f"http://127.0.0.1:{replica.port}") as page,
    ):
        expect(page.get_by_role("alert")).to_contain_text("The console is closed here.")
