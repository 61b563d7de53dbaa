"""TGI's shapes, as its OpenAPI document has them: the fake's answers, and what the dialects send.

TGI itself cannot be had here. Hugging Face publishes the schemas that it makes from TGI's document in an npm package,
for its own clients.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from penstock.dialects.engines.tgi import TGI, TGI_GENERATE
from penstock.dialects.fields import CHAT, COMPLETIONS
from penstock.dialects.native import translate
from penstock.dialects.requests import NOTHING, prepare
from tests.dialects.servers import FakeTgi
from tests.peers.peers import package_of

pytestmark = pytest.mark.slow

PARAMETERS = {"max_new_tokens": 3, "details": True}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS: dict[str, Any] = {
    "model": "m",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 1,
    "stop": ["x"],
    "frequency_penalty": 0.1,
    "n": 1,
    "user": "u",
    "metadata": {"a": "b"},
}


def schema(task: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        Path(package_of("tgi"), "src/tasks", task, "spec", f"{name}.json").read_text(), object_hook=_with_nulls
    )
    return found


def _with_nulls(found: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0's `nullable`, in words of JSON Schema."""
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) is True else found


def answered(path: str, body: dict[str, Any]) -> list[Any]:
    with FakeTgi() as fake:
        asked = urllib.request.Request(fake.url + path, json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(asked) as answer:
            text = answer.read().decode()
    if not body.get("stream") and not path.endswith("_stream"):
        return [json.loads(text)]
    events = [event.removeprefix("data:") for event in text.split("\n\n") if event.startswith("data:")]
    return [json.loads(event) for event in events if event.strip() != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "body", "task", "name"),
    [
        ("/generate", {"inputs": "Hi", "parameters": PARAMETERS}, "text-generation", "output"),
        ("/generate_stream", {"inputs": "Hi", "parameters": PARAMETERS}, "text-generation", "stream_output"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "chat-completion", "output"),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, "chat-completion", "stream_output"),
    ],
)
def test_the_fake_answers_as_tgis_document_says(path: str, body: dict[str, Any], task: str, name: str) -> None:
    validator = Draft7Validator(schema(task, name))
    found = answered(path, body)
    assert found
    for one in found:
        validator.validate(one)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_sent_to_generate_is_what_it_reads(is_stream: bool) -> None:
    assert TGI_GENERATE.native is not None
    asked = json.dumps({**FIELDS, "prompt": "Hi", "stream": is_stream}).encode()
    sent = json.loads(translate(TGI_GENERATE.native, COMPLETIONS, asked, request_id="r", created=1, render=None).body)
    document = schema("text-generation", "input")
    Draft7Validator(document).validate(sent)
    assert sent.keys() <= document["properties"].keys()
    assert sent["parameters"].keys() <= document["$defs"]["TextGenerationInputGenerateParameters"]["properties"].keys()


def test_what_is_sent_to_its_chats_is_what_they_read() -> None:
    chat = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2}
    more = {"max_completion_tokens": 3, "presence_penalty": 0.1, "stream": True, "prompt_cache_key": "k"}
    body = json.dumps({**FIELDS, **chat, **more}).encode()
    sent = json.loads(prepare(TGI, CHAT, body, NOTHING, ()).body)
    document = schema("chat-completion", "input")
    assert sent.keys() <= document["properties"].keys()
    assert sent["max_tokens"] == 3
