"""Pipelines whose steps are real: processes of Python, an ONNX model, and replicas that stream token by token."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest

from penstock.gateway.pipelines.python_pool import start_process
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe import gateway_catalog as catalog
from tests.clocks import ManualClock
from tests.gateway.pipelines.test_served import MESSAGES, num_open, steps_counted
from tests.gateway.pipelines.written import written
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.tensors.models import classify, save_classifier
from tests.tensors.serving import serving as serving_tensors
from tests.waiting import eventually

pytestmark = pytest.mark.slow

STEPS = """
    import os, time

    def numbers(text):
        return [float(ord(one)) / 100 for one in text[:4]]

    def shout(answer):
        return answer.upper()

    def wrong():
        return 3

    def deep():
        found = []
        for _ in range(300):
            found = [found]
        return found

    def die():
        os._exit(7)

    def fill():
        return len([bytearray(1 << 20) for _ in range(4096)])

    def hang(mark):
        open(mark, "w").write(str(os.getpid()))
        time.sleep(600)
"""
ONE_STEP = """
    name: asked
    steps:
      it: {{python: steps.py:{0}, memory_mib: 64, output: {1}}}
      answer: {{template: "{{{{ it | tojson }}}}"}}
"""


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(step_s=0.01) as found:
        yield found


def at(replica: Replica) -> ModelSettings:
    return ModelSettings(replicas=[f"http://{replica.host}:{replica.port}"])


def ask(gateway: RunningGateway, **more: Any) -> Any:
    return gateway.openai.chat.completions.create(model="asked", messages=MESSAGES, **more)


def test_a_classifier_a_model_and_a_post_processor_answer_as_one(tmp_path: Path, replica: Replica) -> None:
    """Each of them somewhere else: a process of the gateway, a replica of tensors, a replica of text."""
    text = """
        name: asked
        steps:
          numbers: {python: steps.py:numbers, inputs: {text: input.text}, output: vector}
          kind:
            model: kinds
            task: tensors
            inputs: {x: {value: numbers, datatype: FP32}}
            tensor: probabilities
            output: {labels: [a, b, c]}
          answer:
            model: small
            prompt: "{{ kind.label }} {{ kind.score | round(2) }}"
            parameters: {max_tokens: 8, seed: 1}
          last: {python: steps.py:shout, inputs: {answer: answer}, output: text}
    """
    model = save_classifier(tmp_path / "kinds.onnx")
    with serving_tensors(model) as tensors:
        pools = {NAME: at(replica), "kinds": ModelSettings(replicas=[tensors.url])}
        with running_gateway(pools=pools, pipelines=[written(tmp_path, text, steps=STEPS)]) as gateway:
            whole = ask(gateway)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(gateway, stream=True))
            counted = eventually(lambda: steps_counted(gateway), lambda found: len(found) == 4)
    (scores,) = classify(np.array([[ord(one) / 100 for one in "Why?"]], dtype=np.float32))
    asked = f"{'abc'[int(scores.argmax())]} {round(float(max(scores)), 2)}"
    expected = replica.answer([{"role": "user", "content": asked}], 8, seed=1)
    assert whole.choices[0].message.content == streamed == expected.upper()
    assert whole.usage.completion_tokens == 8
    assert counted == dict.fromkeys((("numbers", "ok"), ("kind", "ok"), ("answer", "ok"), ("last", "ok")), 2)


def test_the_last_steps_tokens_come_to_the_client_one_by_one(tmp_path: Path, replica: Replica) -> None:
    text = """
        name: asked
        steps:
          first: {model: small, prompt: "{{ input.text }}", parameters: {max_tokens: 2}}
          answer: {model: small, messages: input.messages, system: "{{ first }}", parameters: {ignore_eos: true}}
    """
    with running_gateway(pools={NAME: at(replica)}, pipelines=[written(tmp_path, text)]) as gateway:
        stream = ask(gateway, stream=True, max_tokens=2000)
        first = next(one for one in stream if one.choices[0].delta.content)
        assert first.choices[0].finish_reason is None
        assert [len(one.in_flight) for one in gateway.app.replicas.values()] == [1]  # the rest is still to be made
        stream.close()
        eventually(gateway.is_idle)
        eventually(replica.is_idle)
        stream = ask(gateway, stream=True, max_tokens=20, stream_options={"include_usage": True})
        *chunks, last = stream
        assert len([one for one in chunks if one.choices[0].delta.content]) > 10
        assert last.usage.completion_tokens == 22


def test_texts_become_vectors_and_are_ranked(tmp_path: Path, replica: Replica) -> None:
    text = """
        name: asked
        steps:
          texts: {value: [a cat, a dog, a kitten], output: {list: text}}
          both:
            parallel:
              vectors: {model: small, task: embeddings, text: texts}
              vector: {model: small, task: embeddings, text: input.text}
              best: {model: small, task: rerank, query: input.text, documents: texts, parameters: {top_n: 2}}
          answer: {template: "{{ both | tojson }}"}
    """
    with running_gateway(pools={NAME: at(replica)}, pipelines=[written(tmp_path, text)]) as gateway:
        whole = ask(gateway)
        texts = ["a cat", "a dog", "a kitten"]
        data = gateway.openai.embeddings.create(model=NAME, input=texts, encoding_format="float").data
    found = json.loads(whole.choices[0].message.content)
    assert found["vectors"] == [one.embedding for one in data]
    assert len(found["vector"]) == len(data[0].embedding)
    assert [one["text"] for one in found["best"]] == [texts[one["index"]] for one in found["best"]]
    assert found["best"][0]["score"] >= found["best"][1]["score"]
    assert len(found["best"]) == 2


@pytest.mark.parametrize(
    ("function", "output", "reason"),
    [
        ("wrong", "text", "wrong_result"),
        ("wrong", "{labels: [a, b]}", "wrong_result"),
        ("deep", "json", "wrong_result"),
        ("die", "text", "crashed"),
        ("fill", "json", "memory"),
    ],
)
def test_what_goes_wrong_in_a_process_is_told_and_the_gateway_goes_on(
    tmp_path: Path, replica: Replica, function: str, output: str, reason: str
) -> None:
    text = ONE_STEP.format(function, output)
    with running_gateway(pools={NAME: at(replica)}, pipelines=[written(tmp_path, text, steps=STEPS)]) as gateway:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError) as failed:
                ask(gateway)
            assert (failed.value.status_code, failed.value.code) == (502, "step_failed")
            assert failed.value.body["reason"] == reason  # type: ignore[index]
            assert "step 'it'" in failed.value.message
        eventually(lambda: num_open(gateway) == 0)
    eventually(lambda: not _children())


def test_a_process_that_nobody_waits_for_has_its_time_all_the_same(tmp_path: Path, replica: Replica) -> None:
    """Nobody can stop a function but by killing its process, which a client that leaves is not worth."""
    text = """
        name: asked
        steps:
          it: {python: steps.py:hang, inputs: {mark: input.text}, output: text, timeout_s: 9}
    """
    mark, pipeline = tmp_path / "mark", written(tmp_path, text, steps=STEPS)
    with running_gateway(pools={NAME: at(replica)}, pipelines=[pipeline], clock=ManualClock()) as gateway:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.port)) as leaver:
            body = {"model": "asked", "messages": [{"role": "user", "content": str(mark)}]}
            leaver.request("POST", "/v1/chat/completions", json.dumps(body))
            process = int(eventually(lambda: mark.exists() and mark.read_text()))
        eventually(lambda: num_open(gateway) == 0)
        assert steps_counted(gateway) == {("it", "cancelled"): 1}
        assert _calls(gateway) == {"running": 1, "waiting": 0}
        gateway.advance(10.0)
        eventually(lambda: not psutil.pid_exists(process))
        eventually(lambda: _calls(gateway) == {"running": 0, "waiting": 0})
    eventually(lambda: not _children())


def _calls(gateway: RunningGateway) -> dict[str, float]:
    assert gateway.app.pipelines is not None
    counts = gateway.call(gateway.app.pipelines.counts)
    return {state: count for (_, _, state), count in counts[catalog.PIPELINE_PYTHON_CALLS].items()}


def _children() -> list[int]:
    """Processes of steps that are left. What was killed last may not be reaped: its event loop is gone."""
    found = []
    for one in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [one.pid] if "penstock.gateway.pipelines.python_process" in one.cmdline() else []
    return found


async def test_a_file_in_the_working_directory_stands_in_for_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway may be started anywhere, also where others may write."""
    (step,) = written(tmp_path, ONE_STEP.format("wrong", "text"), steps=STEPS).python_steps
    working = tmp_path / "working"
    working.mkdir()
    (working / "json.py").write_text("raise SystemExit('not the real one')")
    monkeypatch.chdir(working)
    started = await start_process(step)
    reader, writer = await asyncio.open_connection(sock=started.link)
    size = int.from_bytes(await reader.readexactly(4), "big")
    assert json.loads(await reader.readexactly(size)) == {"ready": True}
    writer.close()
    assert await started.process.wait() == 0
