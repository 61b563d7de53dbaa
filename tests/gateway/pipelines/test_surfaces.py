"""Other ways to a pipeline than a chat over HTTP: rows of batches, WebSockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import UnsupportedParameter
from penstock.gateway.pipelines.input import read_input
from penstock.gateway.pipelines.model_call import CHAT_PATH
from penstock.tenancy.store import open_store
from tests.gateway.batches.batching import batching, chat, create, ended, lines, results
from tests.gateway.pipelines.test_served import num_open, steps_counted
from tests.gateway.pipelines.written import written
from tests.gateway.running import running_gateway
from tests.gateway.test_websockets import ask, chatting, text_of, until_ended
from tests.server.replica import Replica
from tests.waiting import eventually

TWO_STEPS = """
    name: asked
    steps:
      first: {model: small, prompt: "{{ input.text }}", parameters: {max_tokens: 2}}
      answer: {template: "said: {{ first }}"}
"""
NO_MODEL = "name: asked\nsteps: {answer: {template: 'said: {{ input.text }}'}}"


@pytest.mark.parametrize("text", [TWO_STEPS, NO_MODEL])
def test_rows_ask_a_pipeline_and_are_charged_for_its_steps(tmp_path: Path, replica_at_hand: Replica, text: str) -> None:
    pipelines = [written(tmp_path, text)]
    num_tokens = 2 if text is TWO_STEPS else 0
    with (
        open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as store,
        batching(store, tmp_path / "files", replica_at_hand, pipelines=pipelines) as gateway,
    ):
        client = gateway.openai
        content = lines([chat("one", model="asked"), chat("two", model="asked"), chat("three", model="asked", n=3)])
        batch = ended(client, create(client, content).id)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
        good = results(client, batch.output_file_id)
        bodies = [good[row]["response"]["body"] for row in ("row-1", "row-2")]
        assert all(body["choices"][0]["message"]["content"].startswith("said: ") for body in bodies)
        assert [body["usage"]["completion_tokens"] for body in bodies] == [num_tokens] * 2
        assert results(client, batch.error_file_id)["row-3"]["response"]["status_code"] == 400
        (charged,) = store.usage.sums("anonymous", since_s=0, until_s=1e12, by="all")
        assert (charged.model, charged.requests, charged.output_tokens) == ("asked", 2, 2 * num_tokens)
        eventually(lambda: num_open(gateway) == 0)
        eventually(lambda: steps_counted(gateway).get(("answer", "ok")) == 2)
        eventually(gateway.is_idle)


def test_a_websocket_asks_a_pipeline(tmp_path: Path, replica_at_hand: Replica) -> None:
    text = """
        name: asked
        steps:
          first: {model: small, prompt: "{{ input.text }}", parameters: {max_tokens: 2}}
          answer: {model: small, messages: input.messages}
    """
    with (
        running_gateway(replica_at_hand, pipelines=[written(tmp_path, text)]) as gateway,
        chatting(gateway.port) as socket,
    ):
        ask(socket, "one", model="asked")
        ask(socket, "two", model="asked", max_tokens=4)
        found = until_ended(socket, "one", "two")
        messages = [{"role": "user", "content": "the first and the second"}]
        assert text_of(found["one"]) == replica_at_hand.answer(messages, 12)
        assert text_of(found["two"]) == replica_at_hand.answer(messages, 4)
        eventually(lambda: num_open(gateway) == 0)


@pytest.mark.parametrize("step", ["prompt: '{{ input.text }}'", "messages: input.messages"])
def test_an_image_is_refused_where_steps_read_the_text_alone(tmp_path: Path, step: str) -> None:
    pipeline = written(tmp_path, f"name: asked\nsteps:\n  answer: {{model: small, {step}}}")
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}]}
        ]
    }
    if pipeline.reads_messages:
        assert read_input(CHAT_PATH, json.dumps(body).encode(), pipeline).values["messages"] == body["messages"]
        return
    with pytest.raises(
        UnsupportedParameter, match=r"messages\[0\]\.content\[1\]: steps of 'asked' read the text alone"
    ):
        read_input(CHAT_PATH, json.dumps(body).encode(), pipeline)
