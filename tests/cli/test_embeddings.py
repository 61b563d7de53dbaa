"""The real things: `penstock serve minilm`, the default model beside generating, and watermarks, by the official
client."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.hub.watermarks import WatermarkFile
from tests.cli.real_server import MODEL, PATIENCE_S, RealServer, real_server
from tests.cli.test_tenants import answer

pytestmark = pytest.mark.slow

DOCUMENTS = ["Berlin is in Germany.", "The capital of France is Paris.", "Bananas are yellow."]


def post(server: RealServer, path: str, **body: object) -> Any:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
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


def test_marked_answers_are_found_by_command(
    server: RealServer, watermarks: WatermarkFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secrets are the same in every run, and so are the answers."""
    monkeypatch.setattr("penstock.hub.watermarks.secrets.token_hex", lambda num_bytes: "5a" * num_bytes)
    watermarks.add("green", scheme="green", delta=5.0)
    watermarks.add("gumbel", scheme="gumbel")
    prompt: Any = [{"role": "user", "content": "Tell me a story about a river."}]
    asked = {"green": {"watermark": "green"}, "gumbel": {"watermark": "gumbel"}, "plain": {}}

    def write(name: str) -> Path:
        body = {"ignore_eos": True, **asked[name]}
        said = server.openai.chat.completions.create(
            model=MODEL, messages=prompt, max_tokens=120, seed=3, extra_body=body
        )
        path = tmp_path / name
        path.write_text(said.choices[0].message.content or "")
        return path

    with ThreadPoolExecutor(len(asked)) as pool:
        texts = list(pool.map(write, asked))
    for mark in ("green", "gumbel"):
        command = ("watermark", "detect", "--key", mark, "--watermark-file", str(watermarks.path))
        verdicts = {text.name: answer(*command, str(text)) for text in texts}
        found = {name for name, verdict in verdicts.items() if verdict.startswith("watermarked: ")}
        assert found == {mark}, verdicts
