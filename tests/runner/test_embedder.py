"""A decoder's vectors and scores are those of the states and probabilities that it generates by."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.token_logprobs import read_rows
from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops import KVShape, Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.embedder import DecoderEmbedder
from tests.devices import NEEDS_GPU
from tests.model.paged import PagedSequence, make_batch
from tests.model.tiny import StateDictCheckpoint, hf_model
from tests.runner.seeing import CONFIGS

TEXTS = [np.random.default_rng(5).integers(0, 256, length).tolist() for length in (1, 7, 33, 1, 16, 7)]


@pytest.fixture(scope="module", params=["llama", "gemma2", "mixtral"])
def theirs(request: pytest.FixtureRequest) -> AutoModelForCausalLM:
    return hf_model(request.param)


@pytest.fixture(scope="module", params=["reference", "native", pytest.param("triton", marks=NEEDS_GPU)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "triton":
        from penstock.model.ops.triton import TritonOps

        torch.set_float32_matmul_precision("highest")
        return TritonOps("cuda", torch.float32)
    try:
        return NativeOps("float32", threads=1) if request.param == "native" else ReferenceOps(torch.device("cpu"))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@lru_cache(maxsize=1)
def ours(theirs: AutoModelForCausalLM, ops: Ops) -> CausalLM:
    return load_model(StateDictCheckpoint(theirs), ops)  # type: ignore[arg-type]


def embedder(theirs: AutoModelForCausalLM, ops: Ops, pooling: str = "mean", most_tokens: int = 80) -> DecoderEmbedder:
    model = ours(theirs, ops)
    shape = KVShape(model.config.num_layers, 1, 16, model.config.num_kv_heads, model.config.head_dim)
    return DecoderEmbedder(model, ops, shape, pooling, most_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_pooled_final_states(theirs: AutoModelForCausalLM, ops: Ops, pooling: str) -> None:
    own = embedder(theirs, ops, pooling)
    found = [np.frombuffer(row, np.float32) for row in own.embed(TEXTS)]
    for text, row in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            states = theirs.model(torch.tensor([text])).last_hidden_state[0]  # type: ignore[attr-defined]
        pooled = states.mean(dim=0) if pooling == "mean" else states[-1]
        expected = torch.nn.functional.normalize(pooled, dim=0).numpy()
        np.testing.assert_allclose(row, expected, atol=2e-5)
        np.testing.assert_allclose(np.frombuffer(own.embed([text])[0], np.float32), row, atol=2e-5)


def test_scores_are_mean_log_probabilities(theirs: AutoModelForCausalLM, ops: Ops) -> None:
    texts, scored = [TEXTS[i] for i in (1, 2, 4, 5)], [3, 30, 15, 6]
    found = embedder(theirs, ops).score(texts, scored)
    for text, count, score in zip(texts, scored, found, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([text])).logits[0].log_softmax(dim=-1)  # type: ignore[operator]
        expected = logits[:-1].gather(1, torch.tensor(text[1:])[:, None])[-count:].mean()
        assert score == pytest.approx(float(expected), abs=2e-4)


def test_a_larger_batch_after_a_smaller_one_is_right(theirs: AutoModelForCausalLM, ops: Ops) -> None:
    own = embedder(theirs, ops)
    small = own.embed(TEXTS[:1])
    own.embed(TEXTS)
    assert own.embed(TEXTS[:1]) == small


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_what_is_longer_than_a_step_is_computed_in_parts(theirs: AutoModelForCausalLM, ops: Ops, pooling: str) -> None:
    whole, cut = (embedder(theirs, ops, pooling, most_tokens) for most_tokens in (80, 8))  # 8: room for two blocks
    assert_same(cut.embed(TEXTS), whole.embed(TEXTS))
    texts, scored = [TEXTS[i] for i in (1, 2, 4)], [6, 20, 1]
    np.testing.assert_allclose(cut.score(texts, scored), whole.score(texts, scored), atol=2e-4)


def test_every_token_but_the_first_has_its_log_probability_its_rank_and_the_likeliest(
    theirs: AutoModelForCausalLM, ops: Ops
) -> None:
    for most_tokens in (80, 8):  # 8: in parts
        found = embedder(theirs, ops, most_tokens=most_tokens).token_logprobs(TEXTS, 3)
        scores = read_rows(b"".join(found), list(map(len, TEXTS)), 3)
        for text, own in zip(TEXTS, scores, strict=True):
            with torch.inference_mode():
                logits = theirs(torch.tensor([text])).logits[0].log_softmax(dim=-1)  # type: ignore[operator]
            told = logits[:-1].gather(1, torch.tensor(text[1:])[:, None])
            np.testing.assert_allclose([one.logprob for one in own], told[:, 0], atol=2e-4)
            for row, one in zip(logits[:-1], own, strict=True):
                likeliest = row.topk(3).values
                np.testing.assert_allclose([value for _, value in one.top], likeliest, atol=2e-4)
                np.testing.assert_allclose([row[token_id] for token_id, _ in one.top], likeliest, atol=2e-4)
                assert float(row.sort(descending=True).values[one.rank - 1]) == pytest.approx(one.logprob, abs=2e-4)


def assert_same(some: list[bytes], others: list[bytes]) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(np.frombuffer(one, np.float32), np.frombuffer(other, np.float32), atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_models_that_take_images_read_texts_as_they_generate_after_them(name: str) -> None:
    config, text = CONFIGS[name], TEXTS[2]
    ops = ReferenceOps(torch.device("cpu"))
    model = load_model(RandomCheckpoint(config), ops)
    shape = KVShape(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim)
    found = DecoderEmbedder(model, ops, shape, "mean", 80).score([text], [len(text) - 1])
    with torch.inference_mode():
        logits = model(
            make_batch([(PagedSequence(text, list(range(8))), len(text))], every_row=True), ops.allocate_kv(shape)
        )
    expected = logits.log_softmax(dim=-1)[:-1].gather(1, torch.tensor(text[1:])[:, None]).mean()
    assert found == [pytest.approx(float(expected), abs=2e-4)]
