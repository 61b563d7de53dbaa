"""Pipelines behind one name, as their clients see them: real HTTP, and a provider that does as it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.settings.gateway import ModelSettings
from tests.gateway.pipelines.written import written
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "Why?"}]
TWO_STEPS = """
    name: asked
    steps:
      question: {template: "Answer shortly: {{ input.text }}"}
      answer: {model: small, prompt: "{{ question }}"}
"""


@contextlib.contextmanager
def serving(directory: Path, text: str, provider: Provider, **files: str) -> Iterator[RunningGateway]:
    pools = {"small": ModelSettings(replicas=[provider.url])}
    with running_gateway(pools=pools, pipelines=[written(directory, text, **files)]) as gateway:
        yield gateway
        eventually(gateway.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_and_a_model_answer_as_one(tmp_path: Path, stream: bool) -> None:
    with providing(says="Because.") as provider, serving(tmp_path, TWO_STEPS, provider) as gateway:
        found: Any = gateway.openai.chat.completions.create(model="asked", messages=MESSAGES, stream=stream)
        if stream:
            chunks = list(found)
            assert {chunk.model for chunk in chunks} == {"asked"}
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Because."
        else:
            assert (found.model, found.choices[0].message.content) == ("asked", "Because.")
            assert found.usage.total_tokens == 4
        (asked,) = provider.asked
        assert asked["messages"] == [{"role": "user", "content": "Answer shortly: Why?"}]
        assert [model.id for model in gateway.openai.models.list()] == ["small", "asked"]
        eventually(lambda: [usage.requests for usage in gateway.ledger.usages] == [0, 1])
        assert [usage.model for usage in gateway.ledger.usages] == ["small", "asked"]
