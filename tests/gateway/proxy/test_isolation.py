"""One tenant sees nothing of another: not its cache, not its models, not its usage, whatever it asks and sends."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api import relay
from penstock.core.settings import ServerSettings
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

PROMPT: Any = [{"role": "user", "content": "a long prompt that is the same for everybody who asks for it here " * 5}]


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving() as found:
        yield found


@pytest.fixture
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica) as found:
        yield found
        eventually(found.is_idle)


def cached(gateway: RunningGateway, key: str, prompt: Any = PROMPT, headers: Any = None, **more: Any) -> int:
    client = gateway.client(key)
    found = client.chat.completions.create(
        model=NAME, messages=prompt, max_tokens=2, extra_body=more, extra_headers=headers
    )
    assert found.usage is not None
    details = found.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def cached_in_stream(gateway: RunningGateway, key: str, prompt: Any) -> int:
    stream = gateway.client(key).chat.completions.create(
        model=NAME, messages=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage for chunk in stream][-1]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_is_found_again_by_who_sent_it_and_by_nobody_else(gateway: RunningGateway) -> None:
    one, other = gateway.add_tenant("one"), gateway.add_tenant("other")
    assert cached(gateway, one) == 0
    assert cached(gateway, one) > 100
    assert cached_in_stream(gateway, one, PROMPT) > 100
    assert cached(gateway, other) == 0
    assert cached_in_stream(gateway, other, PROMPT) > 100  # its own, by now


def test_tenants_that_share_find_each_others_and_nobody_elses(gateway: RunningGateway) -> None:
    prompt = [{"role": "user", "content": "shared: " + PROMPT[0]["content"]}]
    shares, too, own = (
        gateway.add_tenant("shares", cache="shared"),
        gateway.add_tenant("too", cache="shared"),
        gateway.add_tenant("own"),
    )
    assert cached(gateway, shares, prompt) == 0
    assert cached(gateway, too, prompt) > 100
    assert cached(gateway, own, prompt) == 0


def test_a_client_cannot_name_another_tenants_namespace(gateway: RunningGateway) -> None:
    prompt = [{"role": "user", "content": "named: " + PROMPT[0]["content"]}]
    victim, thief = gateway.add_tenant("victim"), gateway.add_tenant("thief", cache="shared")
    assert cached(gateway, victim, prompt, cache_salt="salt") == 0
    assert cached(gateway, victim, prompt) == 0  # its salts keep its own apart
    for salt in ("victim", "6:victim", "6:victimsalt", "victimsalt", "victim\0"):
        assert cached(gateway, thief, prompt, cache_salt=salt) == 0
        assert (
            cached(gateway, thief, prompt, cache_salt=salt, headers={relay.NAMESPACE_HEADER: "victim"}) > 100
        )  # its own
    assert cached(gateway, victim, prompt) > 100


def test_why_a_replica_was_picked_is_told_to_tenants_that_may_know_how_busy_the_fleet_is(
    gateway: RunningGateway,
) -> None:
    def headers(key: str) -> Any:
        raw = gateway.client(key).chat.completions.with_raw_response
        return raw.create(model=NAME, messages=PROMPT, max_tokens=2).headers

    assert "x-penstock-route" in headers("none")  # of a gateway without tenants
    told = headers(gateway.add_tenant("one"))
    assert "x-penstock-route" not in told
    assert told["x-penstock-replica"]
    assert "x-penstock-route" in headers(gateway.add_tenant("curious", route_headers=True))


def test_only_a_gateway_may_name_a_namespace() -> None:
    body = {"messages": PROMPT, "max_tokens": 2, "model": NAME}
    with serving(ServerSettings(gateway_secret="s3cret")) as replica:
        named = {relay.NAMESPACE_HEADER: "one"}
        status, _, answer = replica.call("POST", "/v1/chat/completions", body, **named)
        assert (status, answer["error"]["code"]) == (403, "permission_denied")
        status, _, answer = replica.call("GET", "/v1/penstock/text")
        assert (status, answer["error"]["code"]) == (403, "permission_denied")
        named[relay.SECRET_HEADER] = "s3cret"
        assert replica.call("POST", "/v1/chat/completions", body, **named)[0] == 200
        assert replica.call("POST", "/v1/chat/completions", body, **replica.known)[0] == 200
        assert replica.call("POST", "/v1/chat/completions", body)[0] == 403


def test_no_path_shows_a_tenant_what_is_anothers(gateway: RunningGateway) -> None:
    one = gateway.add_tenant("one", models=[NAME])
    other = gateway.add_tenant("other", models=["else-*"])
    answer = gateway.client(one).chat.completions.create(model=NAME, messages=PROMPT, max_tokens=2)
    request_id = answer._request_id or ""
    assert request_id

    def get(path: str, key: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        found = connection.getresponse()
        text = found.read().decode()
        connection.close()
        return found.status, text

    assert json.loads(get("/v1/models", other)[1])["data"] == []
    paths = [
        f"/v1/models/{NAME}",
        f"/v1/requests/{request_id}",
        f"/v1/chat/completions/{answer.id}",
        "/v1/usage",
        "/v1/tenants",
        "/v1/penstock/snapshot",
        "/v1/penstock/text",
        "/v1/adapters",
        "/admin",
        "/metrics/..",
    ]
    for path in paths:
        status, text = get(path, other)
        assert status == 404, path
        assert "one" not in text.replace("none", "")
        assert request_id not in text.replace(path, "")
    # A request's id is the gateway's own: a client's cannot make two requests look like one in anybody's books.
    named = gateway.client(one).chat.completions.create(
        model=NAME, messages=PROMPT, max_tokens=2, extra_headers={"x-request-id": "chosen"}
    )
    assert named._request_id != "chosen"
    eventually(lambda: len(gateway.ledger.usages) == 2)
    assert len({usage.request_id for usage in gateway.ledger.usages}) == 2
    assert {usage.tenant_id for usage in gateway.ledger.usages} == {"one"}
