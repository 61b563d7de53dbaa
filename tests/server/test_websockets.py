"""WebSockets of a replica that no gateway stands in front of."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from penstock.core.settings import ServerSettings
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually

QUESTION = [{"role": "user", "content": "the first and the second"}]
BODY = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 12}


def url(replica: Replica) -> str:
    return f"ws://{replica.host}:{replica.port}/v1/chat/completions"


def test_a_replica_answers_on_sockets(replica: Replica) -> None:
    with connect(url(replica), proxy=None) as socket:
        socket.send(json.dumps({"type": "request", "id": "a", "body": BODY, "headers": {"x-request-id": "mine"}}))
        answer = json.loads(socket.recv(GIVE_UP_S))
        assert (answer["type"], answer["headers"]["x-request-id"]) == ("response", "mine")
        assert answer["body"]["choices"][0]["message"]["content"] == replica.answer(QUESTION, 12)
        socket.send(json.dumps({"type": "request", "id": "a", "body": {"messages": []}}))
        refused = json.loads(socket.recv(GIVE_UP_S))
        assert (refused["type"], refused["id"], refused["status"]) == ("error", "a", 400)
    eventually(replica.metrics, lambda found: found["penstock_websockets_open"] == 0)


def test_openai_clients_connect_to_a_replica(replica: Replica) -> None:
    with replica.openai.responses.connect(websocket_connection_options={"proxy": None}) as connection:
        connection.response.create(model=NAME, input=QUESTION, temperature=0, max_output_tokens=12)  # type: ignore[arg-type]
        while (event := connection.recv()).type not in ("response.completed", "response.incomplete", "error"):
            pass
        last: Any = event
        assert last.response.output_text == replica.answer(QUESTION, 12)
        connection.response.create(model=NAME, input="And?", previous_response_id="resp_unknown")
        refused: Any = connection.recv()
        assert (refused.error.code, refused.error.param) == ("unsupported_parameter", "previous_response_id")


def test_a_socket_remembers_its_own_conversation(replica: Replica) -> None:
    greedy: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 12}
    turns: list[Any] = list(QUESTION)
    with replica.openai.responses.connect(websocket_connection_options={"proxy": None}) as connection:
        previous: Any = None
        for said in ("And?", "So?", ""):
            told = {"previous_response_id": previous.id} if previous is not None else {}
            connection.response.create(input=[turns[-1]], **told, **greedy)
            while (event := connection.recv()).type not in ("response.completed", "response.incomplete", "error"):
                pass
            last: Any = event
            assert last.response.output_text == replica.answer(turns, 12)
            assert last.response.previous_response_id == (previous.id if previous is not None else None)
            previous = last.response
            turns += [{"role": "assistant", "content": previous.output_text}, {"role": "user", "content": said}]


def test_a_cancel_ends_the_engines_work(slow_replica: Replica) -> None:
    with connect(url(slow_replica), proxy=None) as socket:
        body = BODY | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
        socket.send(json.dumps({"type": "request", "id": "a", "body": body}))
        for kind in ("chunk", "cancelled"):
            while (message := json.loads(socket.recv(GIVE_UP_S)))["type"] != kind:
                assert message["type"] != "error", message
            if kind == "chunk":
                socket.send('{"type":"cancel","id":"a"}')
        eventually(slow_replica.is_idle)


def test_the_secret_of_a_replica_is_a_key_for_its_sockets() -> None:
    with serving(ServerSettings(gateway_secret="river")) as replica:
        with pytest.raises(InvalidStatus) as refused:
            connect(url(replica), proxy=None, additional_headers={"authorization": "Bearer lake"})
        assert refused.value.response.status_code == 403
        with connect(url(replica), proxy=None) as socket:
            socket.send('{"type":"auth","key":"river"}')
            assert json.loads(socket.recv(GIVE_UP_S)) == {"type": "authenticated"}
            socket.send(json.dumps({"type": "request", "id": "a", "body": BODY}))
            assert json.loads(socket.recv(GIVE_UP_S))["type"] == "response"
        client = openai.OpenAI(base_url=f"http://{replica.host}:{replica.port}/v1", api_key="river", max_retries=0)
        with client.responses.connect(websocket_connection_options={"proxy": None}) as connection:
            connection.response.create(model=NAME, input="hello", max_output_tokens=3)
            assert connection.recv().type == "response.created"
