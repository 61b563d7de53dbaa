"""WebSockets of a gateway, with the `websockets` library and OpenAI's own client, before replicas that are real but
for the model."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.http.tls import ServerTls
from penstock.tenancy.keys import TenantState
from penstock.tenancy.store import open_store
from penstock.tenancy.tenants import tenant_from
from tests.certificates import new_ca
from tests.gateway.responses.test_service import frozen, keeping
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually

QUESTION = [{"role": "user", "content": "the first and the second"}]
BODY = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 12, "stream": True}
PATH = "/v1/chat/completions"


@contextlib.contextmanager
def chatting(port: int, key: str | None = None, **options: Any) -> Iterator[ClientConnection]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    scheme = "wss" if "ssl" in options else "ws"
    with connect(f"{scheme}://127.0.0.1:{port}{PATH}", additional_headers=headers, proxy=None, **options) as socket:
        yield socket


def ask(socket: ClientConnection, request_id: str, **body: object) -> None:
    socket.send(json.dumps({"type": "request", "id": request_id, "body": BODY | body}))


def receive(socket: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(socket.recv(GIVE_UP_S))
    return found


def text_of(messages: list[dict[str, Any]]) -> str:
    chunks = [message["data"] for message in messages if message["type"] == "chunk"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def until(socket: ClientConnection, kind: str) -> None:
    while (message := receive(socket))["type"] != kind:
        assert message["type"] != "error", message


def until_ended(socket: ClientConnection, *request_ids: str) -> dict[str, list[dict[str, Any]]]:
    """Messages of these requests, until each has had its last."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in request_ids}
    open_ids = set(request_ids)
    while open_ids:
        message = receive(socket)
        found[message["id"]].append(message)
        if message["type"] in ("done", "error", "response", "cancelled"):
            open_ids.discard(message["id"])
    return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    """With tenants, so that everybody needs a key, and a store of responses."""
    with (
        open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'penstock.db'}") as store,
        keeping(frozen(store), replica_at_hand) as found,
    ):
        found.add_tenant("first")
        yield found
        eventually(found.is_idle)


def test_requests_of_a_socket_are_answered_and_billed_as_over_http(
    gateway: RunningGateway, replica_at_hand: Replica
) -> None:
    key = gateway.add_tenant("acme")
    answer = replica_at_hand.answer(QUESTION, 12)
    with chatting(gateway.port, subprotocols=["penstock.v1", f"bearer.{key}"]) as socket:
        for name in "abc":
            ask(socket, name, **({"stream": False} if name == "c" else {}))
        found = until_ended(socket, *"abc")
    assert [text_of(found[name]) for name in "ab"] == [answer, answer]
    assert [message["type"] for message in found["c"]] == ["response"]
    assert found["c"][0]["body"]["choices"][0]["message"]["content"] == answer
    assert "x-request-id" in found["c"][0]["headers"]
    usages = eventually(
        lambda: [one for one in gateway.ledger.usages if one.tenant_id == "acme"], lambda found: len(found) == 3
    )
    assert len({(usage.input_tokens, usage.output_tokens) for usage in usages}) == 1
    assert 'penstock_websocket_messages_total{direction="received"}' in gateway.metrics()


def test_limits_and_keys_are_those_of_each_request(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("small", limits={"requests_per_minute": 1})
    with chatting(gateway.port, key) as socket:
        ask(socket, "a", stream=False)
        ask(socket, "b")
        found = until_ended(socket, "a", "b")
        refused = next(one[-1] for one in found.values() if one[-1]["type"] == "error")
        assert (refused["status"], refused["error"]["reason"]) == (429, "requests_per_minute")
        assert refused["retry_after"] >= 1
        gateway.call(lambda: gateway.keys.apply([TenantState("small", tenant_from({"id": "small"}))]))
        ask(socket, "c")
        (revoked,) = until_ended(socket, "c")["c"]
        assert (revoked["status"], revoked["error"]["code"]) == (401, "unauthenticated")
    with pytest.raises(InvalidStatus) as turned_away, chatting(gateway.port, key):
        pass
    assert turned_away.value.response.status_code == 401


def test_a_page_of_another_origin_is_turned_away(gateway: RunningGateway) -> None:
    with pytest.raises(InvalidStatus) as refused, chatting(gateway.port, origin="https://evil.example"):  # type: ignore[arg-type]
        pass
    assert refused.value.response.status_code == 403


def test_a_stream_of_a_socket_goes_on_at_another_replica() -> None:
    with slow_and_fast() as (gateway, slow, fast), chatting(gateway.port) as socket:
        answer = fast.answer(QUESTION, 40)
        ask(socket, "a", max_tokens=40)
        begun = [receive(socket) for _ in range(3)]
        gateway.set_in_use(fast, True)
        slow.kill_engine()
        found = begun + until_ended(socket, "a")["a"]
        assert (text_of(found), found[-1]["type"]) == (answer, "done")


def test_work_of_a_socket_ends_with_a_cancel_and_with_the_socket() -> None:
    with slow_and_fast() as (gateway, slow, _), chatting(gateway.port) as socket:
        for name in "ab":
            ask(socket, name, max_tokens=1500, ignore_eos=True)
            until(socket, "chunk")
        socket.send('{"type":"cancel","id":"a"}')
        until(socket, "cancelled")
        eventually(lambda: slow.engine.num_open, lambda count: count == 1)
        socket.close()
        eventually(slow.is_idle)
        eventually(gateway.is_idle)


def test_openai_clients_connect_to_responses(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.client(gateway.add_tenant("talker"))
    greedy: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 12}
    with client.responses.connect(websocket_connection_options={"proxy": None}) as connection:
        connection.response.create(input=QUESTION, **greedy)  # type: ignore[arg-type]
        events = [next(iter(connection))]
        while events[-1].type not in ("response.completed", "response.incomplete", "error"):
            events.append(connection.recv())
        first: Any = events[-1]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert first.response.output_text == replica_at_hand.answer(QUESTION, 12)
        connection.response.create(input="And?", previous_response_id=first.response.id, stream_id="x", **greedy)
        while (event := connection.recv()).type not in ("response.completed", "response.incomplete", "error"):
            assert event.stream_id == "x"  # type: ignore[union-attr]
        turns = [*QUESTION, {"role": "assistant", "content": first.response.output_text}]
        second: Any = event
        assert second.response.output_text == replica_at_hand.answer([*turns, {"role": "user", "content": "And?"}], 12)
        connection.response.create(input="So?", previous_response_id="resp_nobody's", **greedy)
        refused: Any = connection.recv()
        assert (refused.type, refused.status) == ("error", 400)
        assert refused.error.code == "previous_response_not_found"
    assert client.responses.retrieve(second.response.id).status == second.response.status


def test_responses_that_are_not_stored_are_gone_on_from_on_their_socket(
    gateway: RunningGateway, replica_at_hand: Replica
) -> None:
    client = gateway.client(gateway.add_tenant("forgetful"))
    greedy: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 12}
    answers: list[Any] = []
    with client.responses.connect(websocket_connection_options={"proxy": None}) as connection:
        for said, is_stored in ((QUESTION, False), ("And?", False), ("So?", True)):
            before = answers[-1].id if answers else None
            connection.response.create(input=said, previous_response_id=before, store=is_stored, **greedy)  # type: ignore[arg-type]
            while (event := connection.recv()).type not in ("response.completed", "response.incomplete", "error"):
                pass
            last: Any = event
            answers.append(last.response)
    turns: list[Any] = list(QUESTION)
    for answer, said in zip(answers, ("And?", "So?", ""), strict=True):
        assert answer.output_text == replica_at_hand.answer(turns, 12)
        turns += [{"role": "assistant", "content": answer.output_text}, {"role": "user", "content": said}]
    for answer in answers[:2]:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
    assert client.responses.retrieve(answers[2].id).output_text == answers[2].output_text
    assert [answer.store for answer in answers] == [False, False, True]


async def test_openai_clients_connect_to_responses_without_a_thread(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("asynchronous")
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client,
        client.responses.connect(websocket_connection_options={"proxy": None}) as connection,
    ):
        for lane in "xy":
            await connection.response.create(model=NAME, input="hello", max_output_tokens=4, stream_id=lane)
        ended = {}
        async for event in connection:
            if event.type in ("response.completed", "response.incomplete"):
                ended[event.stream_id] = event.response.usage.output_tokens  # type: ignore[union-attr]
            if len(ended) == 2:
                break
        assert set(ended) == {"x", "y"}


def test_sockets_go_over_tls(replica_at_hand: Replica, tmp_path: Path) -> None:
    ca = new_ca(tmp_path)
    files = ca.issue("gateway")
    trusts = ssl.create_default_context(cafile=str(ca.cert))
    with (
        running_gateway(replica_at_hand, tls=ServerTls(str(files.cert), str(files.key))) as gateway,
        chatting(gateway.port, ssl=trusts) as socket,
    ):
        ask(socket, "a")
        assert until_ended(socket, "a")["a"][-1] == {"type": "done", "id": "a"}
