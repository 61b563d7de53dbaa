"""The console's paths at a real door, in front of replicas that are real but for the model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.console.history import COLUMNS
from penstock.console.views import TenantRow
from penstock.core.measurements import EngineTotals
from penstock.core.ranks import RankReading, RankUsage
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.settings.gateway import ModelSettings
from penstock.http.clock import LOOP_CLOCK
from penstock.tenancy.admins import new_admin_key
from penstock.tenancy.prices import Price
from tests.console.at_gateway import Console, console
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

ADMIN = new_admin_key("root", now_s=0)
SECRET = "the prompt that nobody else may read"


def spread_over_two(replica: Replica) -> None:
    """Its engine says that the model is on two ranks, and how they stand."""
    engine = replica.engine
    assert engine.info is not None
    engine.info = replace(engine.info, layout="TP2")
    for usage in (RankUsage(100, 1.0, busy_s=10.0), RankUsage(100, 2.0, busy_s=14.0)):
        for rank in (0, 1):
            engine.ranks.take(RankReading(rank, usage=usage), 1, EngineTotals())


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with serving() as one, serving() as two:
        spread_over_two(two)
        urls = [f"http://{replica.host}:{replica.port}" for replica in (one, two)]
        models = {NAME: ModelSettings(replicas=urls, aliases=["default"], price=Price(1.0, 2.0))}
        # By the clock that the replicas go by: their parts of a request's time are compared with the gateway's whole.
        with running_gateway(pools=models, clock=LOOP_CLOCK) as found:
            yield found


@pytest.fixture
def page(gateway: RunningGateway) -> Iterator[Console]:
    with console(gateway) as found:
        yield found


def talk(gateway: RunningGateway, stream: bool = True, **options: object) -> None:
    client = gateway.client(str(options.pop("key", "none")))
    messages = [{"role": "user", "content": SECRET}]
    answer = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_tokens=8,
        stream=stream,
        **options,  # type: ignore[call-overload]
    )
    if stream:
        list(answer)
    eventually(gateway.is_idle)


def hello_of(gateway: RunningGateway, page: Console, key: str | None = None) -> Any:
    """What who comes now is told, with all that has ended."""
    gateway.call(lambda: page.feed.tick(time.time()))
    with page.events(key) as events:
        return next(events)[1]


def test_who_comes_is_told_all_and_then_the_news(gateway: RunningGateway, page: Console) -> None:
    talk(gateway)
    gateway.call(lambda: page.feed.tick(time.time()))
    with page.events() as events:
        kind, hello = next(events)
        assert kind == "hello"
        assert hello["kind"] == "gateway"
        assert hello["columns"] == list(COLUMNS)
        assert set(hello["series"]) == {"", NAME}
        assert len(hello["times"]) == len(hello["series"][""][0])
        (request,) = hello["requests"]
        (decision,) = hello["decisions"]
        assert decision["id"] == request["id"]
        talk(gateway, stream=False)
        gateway.call(page.feed.start)  # from now on it ticks by itself
        kind, tick = next(events)
        while not tick["requests"]:
            kind, tick = next(events)
        assert kind == "tick"
        assert set(tick["rows"]) == {"", NAME}
        assert [one["model"] for one in tick["requests"]] == [NAME]


def test_the_state_has_replicas_queues_models_and_tenants(gateway: RunningGateway, page: Console) -> None:
    talk(gateway)
    hello = hello_of(gateway, page)
    state = hello["state"]
    assert [(one["state"], one["source"]) for one in state["replicas"]] == [("ready", "file")] * 2
    assert not any(one["is_draining"] for one in state["replicas"])
    assert all(one["kv_capacity"] > 1 and one["max_sequences"] and one["version"] for one in state["replicas"])
    (queue,) = state["queues"]
    assert queue["waiting"] == {"interactive": 0, "standard": 0, "batch": 0}
    assert queue["limits"].keys() == queue["waiting"].keys()
    (model,) = state["models"]
    assert (model["name"], model["aliases"], model["has_price"]) == (NAME, ["default"], True)


def test_a_replica_over_several_ranks_says_how_each_of_them_stands(gateway: RunningGateway, page: Console) -> None:
    one, two = hello_of(gateway, page)["state"]["replicas"]
    assert (one["parallelism"], one["ranks"]) == ("", [])
    assert two["parallelism"] == "TP2"
    assert [(rank["rank"], rank["memory_bytes"], rank["communication"], rank["mbu"]) for rank in two["ranks"]] == [
        (0, 100, 0.25, None),
        (1, 100, 0.25, None),
    ]


def test_a_request_has_its_parts_its_cost_and_its_decision(gateway: RunningGateway, page: Console) -> None:
    talk(gateway)
    hello = hello_of(gateway, page)
    status, _, found = page.get(f"/console/v1/requests/{hello['requests'][-1]['id']}")
    request, (decision,) = found["request"], found["decisions"]
    assert status == 200
    assert list(request["parts"]) == ["tokenize", "queue", "prefill", "first_token"]
    assert sum(request["parts"].values()) <= request["ttft_s"] <= request["total_s"]
    cost = (request["input_tokens"] * 1.0 + request["output_tokens"] * 2.0) / 1e6
    assert request["cost"] == pytest.approx(cost)
    assert decision["picked"] == request["replica"]
    assert decision["candidates"][0]["replica"] == decision["picked"]
    assert all(len(one["scores"]) == len(decision["scorers"]) for one in decision["candidates"])


def test_a_whole_answer_has_parts_too(gateway: RunningGateway, page: Console) -> None:
    talk(gateway, stream=False)
    hello = hello_of(gateway, page)
    request = hello["requests"][-1]
    assert request["ttft_s"] is None
    assert request["parts"]["prefill"] > 0


def test_cached_tokens_of_a_stream_are_known_whether_its_client_asked_for_a_usage_or_not() -> None:
    """And the share of the replica, and of the last quarter of an hour, is made of the same numbers."""
    with serving() as replica:
        models = {NAME: ModelSettings(replicas=[f"http://{replica.host}:{replica.port}"])}
        with running_gateway(pools=models) as gateway, console(gateway) as page:
            for choices in (1, 2):
                talk(gateway, stream=False, n=choices)
                talk(gateway, n=choices)
                talk(gateway, stream_options={"include_usage": True}, n=choices)
            hello = hello_of(gateway, page)
    used = [(one["cached_tokens"], one["input_tokens"]) for one in hello["requests"]]
    first, *others = used
    assert first[0] == 0
    assert others == [(first[1] - 1, first[1])] * 5
    cached, prompt = (sum(column) for column in zip(*used, strict=True))
    assert hello["state"]["replicas"][0]["hit_rate"] == pytest.approx(cached / prompt, abs=1e-4)
    row = {
        name: sum(column)
        for name, column in zip(hello["columns"], hello["series"][""], strict=True)
        if "tokens" in name
    }
    assert (row["cached_tokens"], row["input_tokens"]) == (cached, prompt)


def test_no_word_of_a_prompt_or_an_answer_is_told(gateway: RunningGateway, page: Console) -> None:
    client = gateway.client("none")
    messages = [{"role": "user", "content": SECRET}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=12)  # type: ignore[arg-type]
    eventually(gateway.is_idle)
    said = answer.choices[0].message.content
    assert said
    hello = hello_of(gateway, page)
    told = json.dumps(hello) + json.dumps(page.get(f"/console/v1/requests/{hello['requests'][-1]['id']}")[2])
    assert SECRET not in told
    assert said not in told


def test_what_was_refused_at_the_door_is_among_the_requests(gateway: RunningGateway, page: Console) -> None:
    with pytest.raises(Exception, match="no model"):
        gateway.client("none").completions.create(model="nosuch", prompt="x")
    hello = hello_of(gateway, page)
    request = hello["requests"][-1]
    assert (request["ending"], request["reason"], request["queue_s"]) == ("refused", "model_not_found", None)


def test_with_an_admin_the_page_is_public_and_what_it_shows_is_not(gateway: RunningGateway) -> None:
    with console(gateway, ADMIN.record) as page:
        assert page.get("/")[0] == 200
        assert page.get("/console/v1/session")[2]["needs_key"] is True
        for path in ("/console/v1/feed", "/console/v1/requests/1"):
            assert page.get(path)[0] == 401
            status, _, answer = page.get(path, key="psa_wrong")
            assert status == 401
            assert "admin key" in answer["error"]["message"]
            assert page.get(path, key="psk_0123456789_abc")[0] == 403
        assert page.get("/console/v1/requests/1", key=ADMIN.secret)[0] == 404
        with page.events(ADMIN.secret) as events:
            assert next(events)[0] == "hello"


def test_a_key_in_the_url_opens_nothing(gateway: RunningGateway) -> None:
    with console(gateway, ADMIN.record) as page:
        assert page.get(f"/console/v1/feed?key={ADMIN.secret}")[0] == 401


def test_pages_of_other_origins_and_other_names_of_this_machine_see_nothing(page: Console) -> None:
    assert page.get("/console/v1/feed", origin="http://evil.example")[0] == 403
    assert page.get("/console/v1/feed", sec_fetch_site="cross-site")[0] == 403
    assert page.get("/console/v1/requests/1", host="rebound.example")[0] == 403


def test_whoever_leaves_is_forgotten_and_who_stays_is_told_of_the_end(gateway: RunningGateway, page: Console) -> None:
    with page.events() as left, page.events() as stays:
        next(left), next(stays)
        assert gateway.call(lambda: page.feed.num_viewers) == 2
    eventually(lambda: gateway.call(lambda: page.feed.num_viewers), lambda viewers: viewers == 0)
    with page.events() as events:
        next(events)
        gateway.call(page.feed.close)
        assert [kind for kind, _ in events] == []


def test_all_who_look_get_the_same_bytes_made_once(gateway: RunningGateway, page: Console) -> None:
    seen: list[list[bytes]] = [[], []]
    gateway.call(lambda: [page.feed.watch(one.append, lambda: None) for one in seen])
    gateway.call(lambda: page.feed.tick(1e9))
    assert seen[0][-1] is seen[1][-1]
    assert seen[0][0] is seen[1][0]
    gateway.call(lambda: [page.feed.leave(one.append) for one in seen])


def test_tenants_have_what_they_used_and_what_it_cost() -> None:
    with serving() as replica:
        url = f"http://{replica.host}:{replica.port}"
        models = {NAME: ModelSettings(replicas=[url], price=Price(1.0, 2.0))}
        with running_gateway(pools=models) as gateway, console(gateway, ADMIN.record) as page:
            key = gateway.add_tenant("acme", name="Acme", budget={"tokens_per_day": 1000})
            talk(gateway, key=key)
            hello = hello_of(gateway, page, ADMIN.secret)
    (tenant,) = (msgspec.convert(one, TenantRow) for one in hello["state"]["tenants"])
    assert (tenant.id, tenant.name, tenant.requests, tenant.priority) == ("acme", "Acme", 1, "standard")
    assert tenant.cost == pytest.approx((tenant.input_tokens + 2.0 * tenant.output_tokens) / 1e6)
    assert tenant.device_s > 0
    assert tenant.budget == {"tokens_per_day": 1000}


@pytest.mark.parametrize("path", ["/console/", "/console/nosuch.js", "/console/v1/", "/console/../secret"])
def test_there_is_nothing_else(page: Console, path: str) -> None:
    assert page.get(path)[0] == 404


def test_nothing_is_changed_here(page: Console) -> None:
    assert page.get("/", method="POST")[0] == 405
    assert page.get("/", method="HEAD")[2] == b""


def test_trouble_is_remembered_when_many_good_requests_have_come_since(gateway: RunningGateway, page: Console) -> None:
    with pytest.raises(Exception, match="no model"):
        gateway.client("none").completions.create(model="nosuch", prompt="x")
    refused = hello_of(gateway, page)["requests"][-1]
    good = RequestFacts("good", "chat", Ending.OK, model=NAME)
    gateway.call(lambda: [page.feed.ended(good) for _ in range(2000)])
    requests = hello_of(gateway, page)["requests"]
    assert len(requests) < 400
    assert requests[0]["id"] == refused["id"]
    assert page.get(f"/console/v1/requests/{refused['id']}")[2]["request"]["reason"] == "model_not_found"


def test_a_second_tells_no_more_than_a_person_can_read(gateway: RunningGateway, page: Console) -> None:
    news: list[bytes] = []
    gateway.call(lambda: page.feed.watch(news.append, lambda: None))
    gateway.call(lambda: [page.feed.ended(RequestFacts(str(n), "chat", Ending.OK, model=NAME)) for n in range(5000)])
    gateway.call(lambda: page.feed.tick(time.time()))
    tick = json.loads(news[-1].split(b"data: ", 1)[1])
    assert len(tick["requests"]) == 40
    assert tick["requests"][-1]["id"] == "4999"
    assert tick["rows"][NAME][COLUMNS.index("ok")] == 5000


def test_who_comes_after_the_end_is_sent_away(gateway: RunningGateway, page: Console) -> None:
    gateway.call(page.feed.close)
    with page.events() as events:
        assert [kind for kind, _ in events] == ["hello"]
