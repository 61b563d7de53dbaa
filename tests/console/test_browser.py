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
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.tenancy.store import open_store
from penstock.watch.kinds import KINDS
from tests.cli.real_gateway import real_gateway
from tests.console.at_gateway import Console
from tests.console.browser import chromium, contrast, is_too_wide, opened
from tests.console.test_at_replica import consoled
from tests.sdk import Unverified
from tests.server.replica import NAME, serving
from tests.waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.slow

PAGES = ("overview", "replicas", "fleet", "rollouts", "requests", "routing", "tenants", "alerts", "playground")
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
            expect(page.locator(".pill.good", has_text="healthy")).to_have_count(2)
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
        expect(page.locator(".pill.good", has_text="healthy")).to_have_count(2)
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
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("tbody tr", has_text="refused").first).to_contain_text("model not found")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.keyboard.type("no such thing")
        expect(page.locator(".empty")).to_contain_text("No request matches")


def test_decisions_say_why(browser: Any, fleet: str) -> None:
    with opened(browser, f"{fleet}/#/routing") as page:
        why = page.locator(
            ".decision .why", has_text=re.compile(r"expected to have [\d,]+ of [\d,]+ prompt tokens")
        ).first
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
        objective = page.locator(".objective").first
        expect(objective).to_contain_text("19.4 % of the error budget used")
        expect(objective.get_by_role("meter")).to_have_attribute("aria-valuenow", "19")


class Told:
    """A page that is told what a test says, in the form in which its server says it."""

    def __init__(self, page: Any, url: str) -> None:
        self._page, self._url = page, url
        with urllib.request.urlopen(f"{url}/console/v1/feed", timeout=GIVE_UP_S) as stream:
            assert stream.readline() == b"event: hello\n"
            self.hello = json.loads(stream.readline().removeprefix(b"data: "))
        self.objective = {
            "objective": "ttft",
            "unit": "s",
            "target": 0.5,
            "quantile": 0.95,
            "observed": 0.1,
            "used": 0.2,
        }
        self.objective |= {"state": "ok", "events": 200, "bad": 0, "compliance": 1.0, "goal": 0.95, "budget_left": 1.0}
        self.objective["burn"] = {}
        self.alerts: list[dict[str, Any]] = []

    def show(self, place: str = "overview") -> None:
        slo = {"model": NAME, "window_s": 1e6, "covered_s": 60.0, "state": "ok", "objectives": [self.objective]}
        hello = f"event: hello\ndata: {json.dumps(self.hello)}\n\n"
        feed = {"body": hello, "content_type": "text/event-stream"}
        answers = {
            "console/v1/feed": feed,
            "admin/v1/slo": {"json": {"models": [slo]}},
            "admin/v1/alerts": {"json": {"alerts": self.alerts}},
        }
        for path, answer in answers.items():
            self._page.route(f"**/{path}", partial(_fulfill, answer=answer))
        self._page.goto(f"{self._url}/#/{place}")
        self._page.reload()

    def counts(self, **counts: int) -> None:
        """The series of all models together, as one row."""
        columns = self.hello["columns"]
        self.hello["times"] = [self.hello["at_s"]]
        self.hello["series"] = {"": [[counts.get(name, 0)] for name in columns]}


def _fulfill(route: Any, answer: dict[str, Any]) -> None:
    route.fulfill(**answer)


def test_without_alerts_the_overview_says_how_objectives_and_replicas_are(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        status = page.get_by_label("Alerts", exact=True)
        told.show()
        expect(status).to_contain_text("No alerts")
        expect(status).to_contain_text("The objective is met. 2 of 2 replicas are healthy.")
        expect(status).to_be_in_viewport()
        told.objective |= {"observed": 2.5, "used": 5.0, "state": "critical"}
        told.hello["state"]["replicas"][1]["state"] = "out"
        told.show()
        expect(status).to_contain_text("No alert is firing")
        expect(status).to_contain_text("small: Time to first token is critical: 2.50 s, target 500 ms at p95")
        expect(status).to_contain_text(f"{told.hello['state']['replicas'][1]['name']} is out")
        page.goto(f"{fleet}/#/alerts")
        expect(page.locator(".empty")).to_contain_text("Time to first token is critical")
        told.objective |= {"observed": None, "used": None, "state": "unknown"}
        told.hello["state"]["replicas"][1] |= {"state": "ready", "breaker": "open"}
        told.show()
        expect(status).to_contain_text(": circuit breaker open")
        told.hello["state"]["replicas"].pop()
        told.show()
        expect(status).to_contain_text("0 of 1 objectives are met; there were too few requests to tell of the others.")


def test_of_few_requests_the_failed_are_counted_and_of_many_a_percentage(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        told.objective |= {"objective": "errors", "unit": "ratio", "target": 0.001, "quantile": None, "observed": 0.5}
        told.objective |= {"events": 2, "bad": 1, "state": "critical", "budget_left": -499.0}
        told.counts(ok=1, failed=1)
        told.show()
        failed = page.locator(".figure", has_text="Failed").locator("b")
        expect(failed).to_have_text("1 of 2")
        expect(page.locator(".objective > b")).to_have_text("1 of 2")
        expect(page.locator(".objective")).to_contain_text("500 times the error budget used")
        expect(page.locator(".objective").get_by_role("meter")).to_have_attribute("aria-valuenow", "100")
        told.counts(ok=150, refused=40, failed=10)
        told.show()
        expect(failed).to_have_text("5 %")


def test_a_replica_that_is_out_is_grey_and_its_last_figures_are_not_shown(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        told.hello["state"]["replicas"][1] |= {"state": "out", "heard_s_ago": 12.0, "kv_capacity": None}
        told.show("replicas")
        row = page.get_by_role("table", name="Replicas").locator("tr.out")
        expect(row.locator(".pill")).to_have_text("out")
        expect(row.locator(".pill")).to_have_class(re.compile("quiet"))
        expect(row.locator("td[data-name=Load]")).to_contain_text("–")
        expect(row).to_contain_text("last report 12 s ago")
        expect(page.get_by_label("Replicas", exact=True).first).to_contain_text("1 of 2 healthy")
        assert contrast(page, "tr.out b") >= 4.5
        assert contrast(page, "tr.out .pill") >= 4.5


def test_a_replica_over_several_ranks_shows_each_of_them_when_it_is_opened(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        told.show("replicas")
        columns = page.get_by_role("table", name="Replicas").locator("thead")
        expect(columns).to_contain_text("Model")
        expect(columns).not_to_contain_text("Ranks")
        rank = {"node": "", "device": "GPU-1", "mbu": 0.61, "communication": 0.125, "is_estimated": True}
        ranks = [rank | {"rank": 0, "memory_bytes": 3 << 30}, rank | {"rank": 1, "memory_bytes": 1 << 30, "mbu": None}]
        told.hello["state"]["replicas"][1] |= {"parallelism": "TP2", "ranks": ranks}
        told.show("replicas")
        page.get_by_role("button", name="TP2").click()
        rows = page.get_by_role("table", name="Ranks").locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0)).to_contain_text("GPU-1")
        expect(rows.nth(0)).to_contain_text("3 GiB")
        expect(rows.nth(0)).to_contain_text("61 %")
        expect(rows.nth(1).locator("td[data-name=MBU]")).to_have_text("–")
        expect(rows.nth(1).locator("td[data-name=Communication]")).to_have_text("about 12.5 %")
        page.get_by_role("button", name="Close").click()
        expect(rows).to_have_count(0)


def test_a_replica_with_a_role_says_which(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        told.hello["state"]["replicas"][1] |= {"role": "prefill"}
        told.show("replicas")
        rows = page.get_by_role("table", name="Replicas").locator("tbody tr")
        expect(rows.nth(1).locator("td[data-name=Model]")).to_contain_text("prefill, penstock")
        expect(rows.nth(0).locator("td[data-name=Model]")).not_to_contain_text("both")


def test_an_operator_adds_drains_and_removes_a_replica(browser: Any, tmp_path: Path) -> None:
    with serving() as one, serving() as two, real_gateway(tmp_path, one) as gateway:
        with open_store(gateway.store) as store:
            admin = store.admins.add("root").secret
        eventually(lambda: gateway.ask("GET", "/console/v1/session")[1]["needs_key"])
        with opened(browser, f"{gateway.url}/#/replicas") as page:
            page.get_by_label("Admin key").fill(admin)
            page.keyboard.press("Enter")
            rows = page.get_by_role("table", name="Replicas").locator("tbody tr")
            row, pill = rows.filter(has_text=f":{two.port}"), rows.filter(has_text=f":{two.port}").locator(".pill")
            expect(rows).to_have_count(1)

            page.get_by_role("button", name="Add replica").click()
            page.get_by_label("URL").fill("nowhere")
            page.keyboard.press("Enter")
            dialog = page.get_by_role("dialog", name="Add a replica")
            expect(dialog.get_by_role("alert")).to_contain_text("a replica's address is http://HOST:PORT")
            page.get_by_label("URL").fill(f"http://{two.host}:{two.port}/")
            page.get_by_label("Dialect").select_option("penstock")
            page.keyboard.press("Enter")
            expect(dialog).to_be_hidden()
            expect(pill).to_have_text("healthy")
            expect(row.locator("td[data-name=Source]")).to_contain_text("Store")

            row.get_by_role("button", name="Drain").click()
            expect(pill).to_have_text("draining")
            row.get_by_role("button", name="Undrain").click()
            expect(pill).to_have_text("healthy")

            page.route("**/admin/v1/replicas", lambda route: route.abort("connectionrefused"))
            row.get_by_role("button", name="Drain").click()
            expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
            page.unroute("**/admin/v1/replicas")

            row.get_by_role("button", name="Remove").click()
            page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
            expect(row).to_be_visible()
            row.get_by_role("button", name="Remove").click()
            page.get_by_role("dialog").get_by_role("button", name="Remove").click()
            expect(rows).to_have_count(1)
            expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_replica_of_the_gateways_file_can_be_drained_and_not_removed(browser: Any, tmp_path: Path) -> None:
    with serving() as one, real_gateway(tmp_path, one) as gateway, opened(browser, f"{gateway.url}/#/replicas") as page:
        row = page.get_by_role("table", name="Replicas").locator("tbody tr")
        expect(row.locator("td[data-name=Source]")).to_contain_text("File")
        expect(row.get_by_role("button", name="Remove")).to_have_count(0)
        expect(page.get_by_label("Replicas", exact=True).first).to_contain_text("they are removed there")
        row.get_by_role("button", name="Drain").click()
        expect(row.locator(".pill")).to_have_text("draining")
        expect(row.locator("td[data-name=Source]")).to_contain_text("File")
        row.get_by_role("button", name="Undrain").click()
        expect(row.locator(".pill")).to_have_text("healthy")
        with open_store(gateway.store) as store:
            assert store.replicas.all() == []


def test_cached_tokens_are_the_replicas_and_the_routers_estimate_is_called_one(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        told.counts(ok=2, input_tokens=200, cached_tokens=150)
        request = next(one for one in reversed(told.hello["requests"]) if one["ending"] == "ok")
        request |= {"input_tokens": 96, "cached_tokens": 72}
        scores = {"scores": [0.5], "total": 0.5, "running": 0, "queued_tokens": 0, "host_tokens": 0}
        candidates = [scores | {"replica": name, "matched_tokens": None} for name in ("small-1", "small-2")]
        decision = told.hello["decisions"][-1] | {"id": request["id"], "prompt_tokens": 96, "candidates": candidates}
        decision |= {"scorers": ["least_loaded"], "num_candidates": 2, "picked": "small-1", "matched_tokens": None}
        told.hello["decisions"] = [decision]
        told.show("routing")
        card = page.get_by_label("Prompt tokens from cache")
        expect(card).to_contain_text("75 %")
        expect(card).to_contain_text("150 of 200 prompt tokens")
        expect(card).to_contain_text("The router made no estimate")
        expect(page.locator(".decision .why")).to_have_text("tie with small-2, chosen at random")
        page.locator(".decision .head").click()
        hint = "Cached prompt tokens: the replica reported 72 of 96; the router made no estimate"
        expect(page.locator(".scores")).to_contain_text(hint)
        decision |= {"matched_tokens": 64, "block_tokens": 64, "is_approximate": False}
        told.show("routing")
        expect(card).to_contain_text("The router's estimate for the last 1: 66.7 %, in whole blocks of 64 tokens.")
        expect(page.locator(".decision .why")).to_contain_text("expected to have 64 of 96 prompt tokens cached")
        page.goto(f"{fleet}/#/requests")
        row = page.locator("tbody tr", has_text=request["id"][:12])
        expect(row).to_contain_text("96 (72 cached)")


def test_every_alert_links_to_a_runbook_that_opens(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        told = Told(page, fleet)
        alert = {"severity": "page", "state": "firing", "model": NAME, "replica": "", "summary": "s", "value": 1.0}
        alert |= {"since": 1.0, "resolved_at": None}
        told.alerts = [alert | {"id": kind.name, "alert": kind.name, "runbook": kind.page} for kind in KINDS]
        told.alerts.append(alert | {"id": "1", "alert": "Custom", "runbook": "https://runbooks.example/own.md"})
        told.show("alerts")
        for kind in KINDS:
            page.locator(".alerts li", has_text=kind.name).first.get_by_role("link", name="Runbook").click()
            expect(page.locator(".runbook h3")).to_contain_text(kind.name)
            expect(page.locator(".runbook h4").first).to_have_text("Look")
            page.go_back()
        own = page.locator(".alerts li", has_text="Custom").get_by_role("link", name="Runbook")
        expect(own).to_have_attribute("href", "https://runbooks.example/own.md")


def test_a_hidden_series_is_dimmed_and_not_struck_through(browser: Any, fleet: str) -> None:
    with opened(browser, fleet) as page:
        hidden = page.get_by_role("button", name=re.compile("prompt"))
        expect(hidden).to_have_attribute("aria-pressed", "false")
        expect(hidden).to_have_css("text-decoration-line", "none")
        expect(hidden).to_have_css("opacity", "0.5")


def test_a_wide_screen_is_used_and_on_a_tablet_a_table_shows_that_it_goes_on(browser: Any, fleet: str) -> None:
    with opened(browser, fleet, width=1920, height=1080) as page:
        expect(page.locator(".plot canvas")).to_have_count(4)
        tops = {chart.bounding_box()["y"] for chart in page.locator(".chart").all()}
        assert len(tops) == 1
        last = page.locator(".chart").last.bounding_box()
        assert last["x"] + last["width"] > 1850
    with opened(browser, f"{fleet}/#/replicas", width=820, height=1180, is_touch=True) as page:
        expect(page.locator("tbody tr")).to_have_count(2)
        scroll = page.locator(".scroll").first
        assert scroll.evaluate("box => box.scrollWidth > box.clientWidth")
        expect(scroll).to_have_css("background-image", re.compile("linear-gradient"))
        assert scroll.evaluate("box => getComputedStyle(box, '::-webkit-scrollbar').height") == "10px"
        for name in PAGES:
            page.goto(f"{fleet}/#/{name}")
            expect(page.locator("nav [aria-current]")).to_have_attribute("href", f"#/{name}")
            assert not is_too_wide(page), name


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
        for name in ("fleet", "routing", "tenants", "alerts"):
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
