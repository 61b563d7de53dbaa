"""Exported transformers answer as transformers itself: vectors, scores of pairs, and probabilities of labels."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tensors.models import WORDS, save_tokenizer
from tests.tensors.serving import Served, serving

pytestmark = pytest.mark.slow

TEXTS = ["a b c", "j", "d e f g h i j a b c d", "c c"]
PAIRS = [("a b", "c"), ("j", "a b c d e f g"), ("a", "a")]


def _export(model: Any, path: Path, output: str, kinds: tuple[str, ...]) -> Path:
    import torch

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *given: Any) -> Any:
            return self.inner(**dict(zip(kinds, given, strict=True)))[0]

    path.mkdir()
    ids = torch.full((2, 5), 4)
    given = tuple({"input_ids": ids, "token_type_ids": 0 * ids}.get(kind, torch.ones_like(ids)) for kind in kinds)
    free = {kind: {0: "batch", 1: "sequence"} for kind in kinds}
    free[output] = {0: "batch", 1: "sequence"} if output == "last_hidden_state" else {0: "batch"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Exported().eval(),
            given,
            str(path / "model.onnx"),
            input_names=list(kinds),
            output_names=[output],
            dynamic_axes=free,
            dynamo=False,
        )
    model.config.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    torch.manual_seed(0)
    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "attn_implementation": "eager",
        "initializer_range": 0.5,
    }
    named = {"id2label": {0: "bad", 1: "so-so", 2: "good"}, "label2id": {"bad": 0, "so-so": 1, "good": 2}}
    return {
        "embedder": BertModel(BertConfig(**shape)).eval(),
        "sentiment": BertForSequenceClassification(BertConfig(**shape, **named)).eval(),
        "ranker": BertForSequenceClassification(BertConfig(**shape, num_labels=1)).eval(),
        "robust": RobertaForSequenceClassification(RobertaConfig(**shape, **named)).eval(),
    }


@pytest.fixture(scope="module")
def served(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("exported")
    all_kinds = ("input_ids", "attention_mask", "token_type_ids")
    paths = {
        name: _export(
            model,
            root / name,
            "last_hidden_state" if name == "embedder" else "logits",
            all_kinds[: 2 if name == "robust" else 3],
        )
        for name, model in models.items()
    }
    with serving(root, paths=lambda: paths) as found:
        yield found


def _reference(model: Any, path: Path, *texts: list[str]) -> tuple[Any, Any]:
    """The model's first output, and the mask."""
    import torch
    from transformers import PreTrainedTokenizerFast

    marks = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **marks)
    given = tokenizer(*texts, padding=True, return_tensors="pt", return_token_type_ids=True)
    if model.config.model_type == "roberta":
        del given["token_type_ids"]
    with torch.inference_mode():
        return model(**given)[0].numpy(), given["attention_mask"].numpy()


def _path(served: Served, name: str) -> Path:
    return dict(served.replica.repository._paths())[name]


def _post(served: Served, path: str, **body: Any) -> list[Any]:
    status, answer = served.call("POST", path, body)
    assert status == 200, answer
    found: list[Any] = answer["data"]
    return found


def test_vectors_are_those_of_transformers(served: Served, models: dict[str, Any]) -> None:
    states, mask = _reference(models["embedder"], _path(served, "embedder"), TEXTS)
    mean = (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    wanted = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    found = [one["embedding"] for one in _post(served, "/v1/embeddings", model="embedder", input=TEXTS)]
    assert np.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["sentiment", "robust"])
def test_probabilities_are_those_of_transformers(served: Served, models: dict[str, Any], name: str) -> None:
    logits, _ = _reference(models[name], _path(served, name), TEXTS)
    wanted = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = _post(served, "/classify", model=name, input=TEXTS)
    assert np.allclose([one["probs"] for one in found], wanted, atol=1e-5)
    names = [models[name].config.id2label[int(row.argmax())] for row in wanted]
    assert [one["label"] for one in found] == names


def test_scores_of_pairs_are_those_of_transformers(served: Served, models: dict[str, Any]) -> None:
    firsts, others = [list(texts) for texts in zip(*PAIRS, strict=True)]
    logits, _ = _reference(models["ranker"], _path(served, "ranker"), firsts, others)
    found = _post(served, "/v1/score", model="ranker", text_1=firsts, text_2=others)
    assert np.allclose([one["score"] for one in found], 1 / (1 + np.exp(-logits[:, 0])), atol=1e-5)
