"""The commands about watermarks as a user runs them."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path

import pytest

from penstock.core.settings import Settings
from penstock.hub.watermarks import WatermarkFile
from tests.cli.test_tenants import answer, complaint, run
from tests.text import small


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatermarkFile:
    """With secrets that are the same in every run, and so are the verdicts."""
    drawn = itertools.count(1)
    monkeypatch.setattr("penstock.hub.watermarks.secrets.token_hex", lambda num_bytes: f"{next(drawn):02x}" * num_bytes)
    monkeypatch.setenv("PENSTOCK_WATERMARKS", str(tmp_path / "marks.json"))
    return WatermarkFile.at(None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer and no weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer = small.load(small.byte_level())
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-5,
                "vocab_size": tokenizer.vocab_size,
                "max_position_embeddings": 64,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
        )
    )
    return directory


def test_watermarks_are_added_listed_and_removed_without_a_word_of_their_secrets(marks: WatermarkFile) -> None:
    told = run("watermark", "add", "acme", "--delta", "1.5")
    run("watermark", "add", "quiet", "--scheme", "gumbel")
    listed = answer("watermark", "list")
    as_json = json.loads(answer("watermark", "list", "--json"))
    assert [(one["name"], one["scheme"], one["delta"]) for one in as_json] == [
        ("acme", "green", 1.5),
        ("quiet", "gumbel", 2.0),
    ]
    for mark in marks.read().values():
        assert mark.secret not in f"{told}{listed}{as_json}"
    run("watermark", "remove", "quiet")
    assert list(marks.read()) == ["acme"]


def test_a_text_is_judged(marks: WatermarkFile, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks.add("acme")
    text = tmp_path / "text.txt"
    text.write_text("A short one.")
    assert answer("watermark", "detect", "--key", "acme", "--model", str(model), str(text)).startswith("too short")
    text.write_text("".join(map(chr, range(33, 500))))
    found = json.loads(answer("watermark", "detect", "--key", "acme", "--model", str(model), "--json", str(text)))
    assert found["verdict"] == "no watermark found"
    assert 1e-4 < found["p_value"] <= 1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    again = json.loads(answer("watermark", "detect", "--key", "acme", "--model", str(model), "--json"))
    assert again == found
    sure = answer("watermark", "detect", "--key", "acme", "--model", str(model), "--significant", "0.99999", str(text))
    assert sure.startswith("watermarked: z ")


def test_what_cannot_be_judged_is_told(marks: WatermarkFile, model: Path, tmp_path: Path) -> None:
    marks.add("acme")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    common = ("watermark", "detect", "--model", str(model))
    assert "did you mean 'acme'" in complaint(*common, "--key", "acm", str(binary))
    assert "not a text in UTF-8" in complaint(*common, "--key", "acme", str(binary))
    assert "cannot read" in complaint(*common, "--key", "acme", str(tmp_path / "none"))
    assert "between 0 and 1" in complaint(*common, "--key", "acme", "--significant", "2", str(binary))


def test_a_server_does_not_start_with_a_watermark_that_is_not_there(marks: WatermarkFile) -> None:
    assert Settings().server.watermark is None
    assert "there is no watermark 'nope'" in complaint("serve", "smollm2", "--port", "0", "--watermark", "nope")
