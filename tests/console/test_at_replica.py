"""The console of a single replica: the same page and the same form, without a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Iterator

import pytest

from penstock.console.at_replica import with_console
from penstock.console.feed import Feed
from penstock.console.history import COLUMNS
from penstock.console.replica_source import facts_of
from penstock.console.top.client import Source
from penstock.core.errors import PermissionDenied
from penstock.core.settings import ServerSettings
from penstock.core.slo import Slo
from penstock.gateway.records.facts import Ending
from penstock.server.recorder import Finished
from tests.console.at_gateway import Console
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

SLO = Slo(ttft_s=0.25, tpot_s=0.05)


@contextlib.contextmanager
def consoled(
    settings: ServerSettings | None = None, *, is_loopback: bool = True, period_s: float = 0.05
) -> Iterator[tuple[Replica, Console]]:
    found: list[tuple[Feed, asyncio.AbstractEventLoop]] = []

    def mount(app, recorder):  # type: ignore[no-untyped-def]
        console, feed = with_console(app, recorder, NAME, SLO, is_loopback=is_loopback, period_s=period_s)
        found.append((feed, asyncio.get_running_loop()))
        return console

    with serving(settings, mount=mount) as replica:
        yield replica, Console(replica.port, *found[0])


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Replica, Console]]:
    with consoled() as found:
        yield found


def test_the_page_and_the_model_are_at_one_address(both: tuple[Replica, Console]) -> None:
    _, page = both
    status, headers, content = page.get("/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert b"<title>penstock" in content
    assert page.get("/", if_none_match=headers["etag"])[0] == 304
    assert page.get("/console/console.js", accept_encoding="gzip")[1]["content-encoding"] == "gzip"
    assert page.get("/v1/models")[2]["data"][0]["id"] == NAME
    assert page.get("/console/nosuch")[0] == 404


def test_a_request_is_told_of_with_its_parts(both: tuple[Replica, Console]) -> None:
    replica, page = both
    answer = replica.openai.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "a secret"}], max_tokens=6, stream=True, temperature=0
    )
    list(answer)
    with page.events() as events:
        kind, hello = next(events)
        assert (kind, hello["kind"], hello["columns"]) == ("hello", "replica", list(COLUMNS))
        requests = hello["requests"]
        while not requests:
            kind, tick = next(events)
            requests = tick["requests"]
    (request,) = requests
    assert (request["ending"], request["model"], request["output_tokens"]) == ("ok", NAME, 6)
    assert list(request["parts"]) == ["tokenize", "queue", "prefill", "first_token"]
    assert sum(request["parts"].values()) == pytest.approx(request["ttft_s"], abs=1.5e-6)
    assert page.get(f"/console/v1/requests/{request['id']}")[2]["request"]["id"] == request["id"]


def test_the_state_is_of_one_replica_with_its_targets(both: tuple[Replica, Console]) -> None:
    _, page = both
    with page.events() as events:
        state = next(events)[1]["state"]
    (replica,), (model,) = state["replicas"], state["models"]
    assert (replica["state"], replica["kind"], state["tenants"]) == ("ready", "penstock", [])
    assert (model["name"], model["ttft_s"], model["tpot_s"]) == (NAME, 0.25, 0.05)


def test_pages_of_other_origins_see_nothing(both: tuple[Replica, Console]) -> None:
    _, page = both
    assert page.get("/console/v1/feed", origin="http://evil.example")[0] == 403
    assert page.get("/console/v1/feed", host="rebound.example")[0] == 403


def test_whoever_leaves_is_forgotten(both: tuple[Replica, Console]) -> None:
    _, page = both
    with page.events() as events:
        next(events)
        eventually(lambda: page.feed.num_viewers, lambda viewers: viewers == 1)  # others have left by then
    eventually(lambda: page.feed.num_viewers, lambda viewers: viewers == 0)


def test_beyond_this_machine_it_is_closed_and_says_why() -> None:
    with consoled(is_loopback=False) as (_, page):
        assert page.get("/")[0] == 200
        assert "penstock gateway" in page.get("/console/v1/session")[2]["closed"]
        status, _, answer = page.get("/console/v1/feed")
        assert status == 403
        assert "knows no keys" in answer["error"]["message"]


def test_with_a_secret_it_is_for_those_who_know_it_as_top_may() -> None:
    with consoled(ServerSettings(gateway_secret="hush")) as (replica, page):
        assert "gateway_secret" in page.get("/console/v1/session")[2]["closed"]
        assert page.get("/console/v1/feed")[0] == 403
        assert page.get("/console/v1/requests/x")[0] == 403
        assert page.get("/console/v1/requests/x", authorization="Bearer hush")[0] == 404
        url = f"http://{replica.host}:{replica.port}"
        assert Source(url, "hush").look().hello.kind == "replica"
        with pytest.raises(PermissionDenied):
            Source(url, "wrong").look()


def test_a_stopping_server_ends_the_streams_of_those_who_look() -> None:
    with consoled() as (_, page):
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=GIVE_UP_S)
        connection.request("GET", "/console/v1/feed")
        answer = connection.getresponse()
        assert answer.readline() == b"event: hello\n"
        page.loop.call_soon_threadsafe(page.feed.close)
        assert answer.read().endswith(b"\n\n")
        connection.close()


@pytest.mark.parametrize(
    ("status", "outcome", "ending", "reason"),
    [
        (200, "ok", Ending.OK, ""),
        (500, "cancelled", Ending.CLIENT_GONE, ""),
        (499, "request_aborted", Ending.CLIENT_GONE, ""),
        (400, "invalid_request", Ending.REFUSED, "invalid_request"),
        (503, "engine_failed", Ending.FAILED, "engine_failed"),
    ],
)
def test_an_outcome_is_told_as_a_gateway_would(status: int, outcome: str, ending: Ending, reason: str) -> None:
    facts = facts_of(Finished("1", NAME, "/v1/completions", status, outcome, 0.5))
    assert (facts.ending, facts.reason, facts.queue_s) == (ending, reason, None)
