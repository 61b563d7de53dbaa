"""Pipelines as their users have them: the shipped example on real processes, and `penstock serve --pipeline`."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.reader import Reader, reading
from tests.waiting import eventually

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipelines"
SAID = {  # none of them is among the sentences that the classifier has learned
    "de": "Mein Kühlschrank ist seit gestern kaputt.",
    "en": "My fridge stopped working yesterday and all the food is spoiled.",
    "es": "Mi nevera dejó de funcionar ayer.",
    "fr": "Mon réfrigérateur ne marche plus depuis hier.",
    "it": "Il mio frigorifero non funziona più da ieri.",
}


def client_of(reader: Reader) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{reader.url(8000)}/v1", api_key="none", max_retries=0)


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_the_example_works_as_it_is_written(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    with reading(tmp_path) as reader:
        printed = reader.follow((EXAMPLE / "README.md").read_text())
        (triaged,) = (json.loads(text) for line, text in printed.items() if '"triage"' in line)
        assert json.loads(triaged["choices"][0]["message"]["content"])["queue"].endswith(" (de)")
        (streamed,) = (text for line, text in printed.items() if '"reply"' in line)
        assert streamed.count("chat.completion.chunk") > 5
        assert streamed.endswith("data: [DONE]\n\n")
        assert "its answer is json (object)" in printed["penstock pipeline check --config gateway.yaml"]

        client = client_of(reader)
        assert [model.id for model in client.models.list()] == ["smollm2", "language", "triage", "reply"]
        for language, text in SAID.items():
            found: Any = client.chat.completions.create(
                model="triage", messages=said(text), extra_body={"include_steps": True}
            )
            ticket = json.loads(found.choices[0].message.content)
            assert ticket["queue"].endswith(f" ({language})")
            assert set(ticket) == {"queue", "priority", "summary", "sure"}
            steps = {one["step"]: one for one in found.steps}
            assert list(steps) == ["letters", "language", "facts", "ticket"]
            assert steps["facts"]["usage"]["total_tokens"] == found.usage.total_tokens > 0
        *_, end = client.chat.completions.create(
            model="reply", messages=said(SAID["it"]), stream=True, max_tokens=8, extra_body={"include_steps": True}
        )
        assert "answer.it" in {one["step"] for one in end.model_dump()["steps"]}


def test_serve_has_pipelines_reads_them_again_and_lets_runs_end(tmp_path: Path) -> None:
    pipeline = tmp_path / "asked.yaml"
    text = 'name: asked\nsteps: {answer: {model: smollm2, prompt: "Hi", parameters: {max_tokens: 3}}}'
    pipeline.write_text(text)
    with reading(tmp_path) as reader:
        reader.start("penstock serve smollm2 --pipeline asked.yaml")
        client = client_of(reader)

        def answer() -> Any:
            return client.chat.completions.create(model="asked", messages=said("x"))

        assert answer().usage.completion_tokens == 3
        (server,) = reader.servers
        pipeline.write_text(text.replace("smollm2", "smolm2"))
        server.send_signal(signal.SIGHUP)
        eventually(lambda: "did you mean 'smollm2'?" in reader.log())
        assert answer().usage.completion_tokens == 3
        pipeline.write_text(text.replace("max_tokens: 3", "max_tokens: 2"))
        server.send_signal(signal.SIGHUP)
        eventually(lambda: answer().usage.completion_tokens == 2)
        pipeline.write_text(text.replace("max_tokens: 3", "max_tokens: 300, ignore_eos: true"))
        server.send_signal(signal.SIGHUP)
        eventually(lambda: reader.log().count("changed: pipelines") == 2)
        stream = client.chat.completions.create(model="asked", messages=said("x"), stream=True)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)  # it lets runs end
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
