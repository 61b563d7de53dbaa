from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import ModelMissing
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.resolve import default_name, resolve
from tests.hub.families import FAMILIES, random_model, tensors_of, write_gguf


def test_files_and_directories_are_told_apart(tmp_path: Path) -> None:
    model = random_model(FAMILIES["llama"])
    gguf = write_gguf(tmp_path / "tiny.gguf", FAMILIES["llama"], tensors_of(model))
    model.save_pretrained(tmp_path / "directory")
    assert isinstance(resolve(str(gguf)), GGUFCheckpoint)
    assert isinstance(resolve(str(tmp_path / "directory")), HFCheckpoint)


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("SmolLM2", "did you mean 'smollm2'"),
        ("Qwen/Qwen3-0.6B", "did you mean 'hf:Qwen/Qwen3-0.6B'"),
        ("nothing.gguf", r"Give a name \(smollm2, minilm\), a \.gguf file, a Hugging Face directory, or hf:org/name"),
        ("hf:no-slash", "hf:org/name"),
        ("hf:../../etc/passwd", "hf:org/name"),
        ("hf:../passwd", "hf:org/name"),
    ],
)
def test_what_names_no_model_is_answered_with_what_would(spec: str, advice: str) -> None:
    with pytest.raises(ModelMissing, match=advice):
        resolve(spec)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Tiny.Q4_1.gguf", "Tiny.Q4_1"),
        ("/models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("hf:Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_model_is_served_under_a_name_a_user_would_expect(spec: str, name: str) -> None:
    assert default_name(spec) == name
