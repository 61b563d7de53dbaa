"""The real things: `penstock serve minilm`, and the default model beside generating, by the official client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.hub.watermarks import WatermarkFile
from tests.cli.real_server import MODEL, RealServer, real_server
from tests.cli.test_tenants import answer

pytestmark = pytest.mark.slow

DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "Bananas are yellow."]


def post(server: RealServer, path: str, **body: object) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_minilm_embeds_and_does_nothing_else() -> None:
    with real_server("--threads", "1", model="minilm") as server:
        assert "vectors of texts" in server.banner
        found = server.openai.embeddings.create(model="minilm", input=["This is an example sentence", "short"])
        assert found.data[0].embedding[:3] == pytest.approx([0.0676569, 0.0634959, 0.0487131], abs=2e-6)
        ranked = post(server, "/v1/rerank", model="minilm", query="What is the capital of France?", documents=DOCUMENTS)
        assert ranked["results"][0]["index"] == 1
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
            server.openai.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
        assert server.status("/health/deep") == 200


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> WatermarkFile:
    return WatermarkFile(tmp_path_factory.mktemp("marks") / "watermarks.json")


@pytest.fixture(scope="module")
def server(marks: WatermarkFile) -> Iterator[RealServer]:
    with real_server("--threads", "1", "--watermark-file", str(marks.path)) as found:
        yield found


def test_the_default_model_embeds_and_ranks_beside_generating(server: RealServer) -> None:
    many = server.openai.embeddings.create(model=MODEL, input=["a cat", "a kitten", "the stock market fell"])
    cat, kitten, market = (one.embedding for one in many.data)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, market, strict=True))
    alone = server.openai.embeddings.create(model=MODEL, input="a kitten").data[0].embedding
    assert alone == pytest.approx(kitten, abs=1e-4)
    ranked = post(server, "/v1/rerank", model=MODEL, query="What is the capital of France?", documents=DOCUMENTS)
    assert ranked["results"][0]["index"] == 1
    scores = post(server, "/v1/score", model=MODEL, text_1="The capital of France is", text_2=[" Paris", " banana"])
    assert scores["data"][0]["score"] > scores["data"][1]["score"] + 5


# The secret is new in every run: strong enough to be found whatever it is.
@pytest.mark.parametrize(("scheme", "strength"), [("green", {"delta": 5.0}), ("gumbel", {})])
def test_a_marked_answer_is_found_by_command(
    server: RealServer, marks: WatermarkFile, scheme: str, strength: dict[str, float], tmp_path: Path
) -> None:
    marks.add(scheme, scheme=scheme, **strength)
    prompt: Any = [{"role": "user", "content": "Tell me a story about a river."}]
    texts = {}
    for name, more in {"marked": {"watermark": scheme}, "plain": {}}.items():
        body = {"ignore_eos": True, **more}
        said = server.openai.chat.completions.create(
            model=MODEL, messages=prompt, max_tokens=160, seed=3, extra_body=body
        )
        texts[name] = tmp_path / name
        texts[name].write_text(said.choices[0].message.content or "")
    command = ("watermark", "detect", "--key", scheme, "--watermark-file", str(marks.path))
    assert answer(*command, str(texts["marked"])).startswith("watermarked: ")
    assert not answer(*command, str(texts["plain"])).startswith("watermarked: ")
