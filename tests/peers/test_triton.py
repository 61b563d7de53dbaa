"""Real Triton with a model that has the shape of TensorRT-LLM's ensemble: text in, text out, one event for a token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.gateway.records.token_usage import TokenUsage, find_usage
from tests.gateway.following import Following, following
from tests.peers.peers import free_port, library_path, python_of, running, wait_for
from tests.waiting import eventually_async

pytestmark = pytest.mark.slow

_MODEL = """
import sys, time
import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

WORDS = ["The", " quick", " brown", " fox", " jumps"]

def infer(requests):
    given = {name: value.reshape(-1)[0] for name, value in requests[0].data.items()}
    words = WORDS[: int(given.get("max_tokens", 100))]
    is_stream = bool(given.get("stream", False))
    for part in words if is_stream else ["".join(words)]:
        time.sleep(0.02)
        count = 1 if is_stream else len(words)
        yield [{"text_output": np.array([part.encode()]), "num_input_tokens": np.array([7], np.int32),
                "num_output_tokens": np.array([count], np.int32)}]

def optional(name, dtype):
    return Tensor(name=name, dtype=dtype, shape=(1,), optional=True)

http, metrics, grpc = map(int, sys.argv[1:])
with Triton(config=TritonConfig(http_port=http, metrics_port=metrics, grpc_port=grpc)) as triton:
    triton.bind(
        "ensemble", infer,
        [Tensor(name="text_input", dtype=np.bytes_, shape=(1,)), optional("max_tokens", np.int32),
         optional("stream", np.bool_), optional("bad_words", np.bytes_), optional("stop_words", np.bytes_),
         optional("temperature", np.float32), optional("exclude_input_in_output", np.bool_),
         optional("return_num_input_tokens", np.bool_), optional("return_num_output_tokens", np.bool_)],
        [Tensor(name="text_output", dtype=np.bytes_, shape=(1,)),
         Tensor(name="num_input_tokens", dtype=np.int32, shape=(1,)),
         Tensor(name="num_output_tokens", dtype=np.int32, shape=(1,))],
        config=ModelConfig(batching=False, decoupled=True),
    )
    triton.serve()
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    python, log = python_of("triton"), tmp_path_factory.mktemp("triton") / "log"
    http, metrics, grpc = free_port(), free_port(), free_port()
    command = [python, "-c", _MODEL, str(http), str(metrics), str(grpc)]
    with running(command, log, LD_LIBRARY_PATH=library_path()) as process:
        wait_for(f"http://127.0.0.1:{http}/v2/models/ensemble/ready", process, log)
        yield f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}"


@contextlib.asynccontextmanager
async def followed(triton: tuple[str, str], dialect: str | None) -> AsyncIterator[Following]:
    async with following(triton[0], model="ensemble", dialect=dialect, metrics=triton[1]) as found:
        found.upstream.render = lambda messages: str(messages[-1]["content"])
        await eventually_async(lambda: found.follower.dialect)
        yield found


async def test_triton_is_recognised_and_ready(triton: tuple[str, str]) -> None:
    async with followed(triton, None) as found:
        await eventually_async(lambda: found.state, lambda state: state == "ready")
        assert found.follower.dialect is not None
        assert found.follower.dialect.name == "triton"  # its model does not say that it is TensorRT-LLM


async def test_the_ensemble_answers_in_openais_words(triton: tuple[str, str]) -> None:
    async with followed(triton, "triton-trtllm") as found:
        said = await found.ask(prompt="Hi", max_tokens=3, temperature=0.5, stop="x")
        assert said.status == 200, said.body
        assert (
            said.json["choices"][0] | {"text": "The quick brown", "finish_reason": "length"} == said.json["choices"][0]
        )
        assert said.json["usage"]["completion_tokens"] == 3
        chat = await found.ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        assert chat.json["choices"][0]["message"]["content"] == "The quick brown fox jumps"


async def test_the_ensemble_streams_in_openais_words(triton: tuple[str, str]) -> None:
    async with followed(triton, "triton-trtllm") as found:
        said = await found.ask(prompt="Hi", stream=True)
        events = [json.loads(each[6:]) for each in said.body.split(b"\n\n")[:-2] if each.startswith(b"data: ")]
        assert [event["choices"][0]["text"] for event in events] == ["The", " quick", " brown", " fox", " jumps", ""]
        assert find_usage(said.body) == TokenUsage(7, 5)


async def test_what_triton_refuses_comes_back_as_an_error(triton: tuple[str, str]) -> None:
    async with followed(triton, "triton-trtllm") as found:
        said = await found.ask(prompt="Hi", max_tokens="many")
        assert said.status in (400, 500)
        assert "signed-integer" in said.json["error"]["message"]
