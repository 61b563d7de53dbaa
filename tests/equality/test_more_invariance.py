"""A mixture of experts, caps, norms behind attention and recurrent states change nothing: a request's logits are
bitwise the same however it was batched, chunked, cached or resumed. Who shares an expert with whom is different in
every batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from penstock.core.model_config import AttentionTemperature, Experts, LatentAttention, LinearAttention, Routing
from penstock.core.request import Request
from penstock.model.layers import CausalLM
from penstock.model.loading import random_model
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from tests.equality.inprocess import InProcess
from tests.equality.test_invariance import CONFIG, REQUESTS, SCENES

GEMMA = {"activation": "gelu", "norm_offset": 1.0, "embedding_scale": 24.0, "local_rope_theta": 500.0}
LATENT = LatentAttention(rank=56, query_rank=48, plain_dim=24, rotary_dim=16, value_dim=40)
MODELS = {
    "experts": replace(CONFIG, architecture="qwen3_moe", experts=Experts(13, 4, 200)),
    "shared expert": replace(
        CONFIG,
        architecture="qwen2_moe",
        attention_bias=True,
        experts=Experts(9, 3, 136, normalized=False, shared_intermediate_size=100, dense_layers=(1,)),
    ),
    "gemma": replace(CONFIG, architecture="gemma2", attention_cap=2.0, logit_cap=3.0, **GEMMA),
    "part of a head": replace(CONFIG, architecture="phi3", rotary_dim=48),
    "all heads normed": replace(CONFIG, architecture="olmo2"),
    "chunks": replace(
        CONFIG,
        architecture="llama4_text",
        in_chunks=True,
        unrotated_layers=(1,),
        temperature=AttentionTemperature(0.3, 20),
        experts=Experts(5, 1, 96, shared_intermediate_size=64, shared_gate=False, dense_layers=(0,)),
    ),
    "latents": replace(
        CONFIG,
        architecture="deepseek_v3",
        num_kv_heads=1,
        head_dim=LATENT.cached_dim,
        latent=LATENT,
        experts=Experts(
            12,
            3,
            136,
            shared_intermediate_size=100,
            dense_layers=(0,),
            shared_gate=False,
            routing=Routing(num_groups=3, groups_per_token=2, scale=1.5),
        ),
    ),
    "recurrent state": replace(
        CONFIG,
        architecture="qwen3_next",
        norm_offset=1.0,
        output_gate=True,
        linear=LinearAttention((0,), 2, 4, 24, 40, 4),
        experts=Experts(9, 3, 136, shared_intermediate_size=100),
    ),
}
WAYS: dict[str, dict[str, int]] = {
    "together": {},
    "apart": {"apart": 3, "chunk_tokens": 40},
    "in chunks": {"chunk_tokens": 7},
    "preempted": {"num_blocks": 24, "chunk_tokens": 19},
    "on two threads": {"threads": 2, "chunk_tokens": 50},
}


@cache
def model_on(name: str, arithmetic: str, threads: int) -> tuple[CausalLM, NativeOps]:
    ops = SCENES[arithmetic](threads=threads)
    return random_model(MODELS[name], ops, seed=11), ops


def run(
    name: str, arithmetic: str, requests: list[Request], *, apart: int = 0, threads: int = 1, **how: int
) -> InProcess:
    engine = InProcess(*model_on(name, arithmetic, threads), **how)
    engine.run(*requests, apart=apart)
    return engine


@cache
def alone(name: str, arithmetic: str) -> dict[str, InProcess]:
    return {request.id: run(name, arithmetic, [request]) for request in REQUESTS}


def check(name: str, arithmetic: str, way: str) -> None:
    try:
        expected = alone(name, arithmetic)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    engine = run(name, arithmetic, REQUESTS, **WAYS[way])
    for request in REQUESTS:
        by_itself = expected[request.id]
        assert engine.outputs[request.id] == by_itself.outputs[request.id]
        assert torch.equal(torch.stack(engine.logits[request.id]), torch.stack(by_itself.logits[request.id]))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("all heads normed", "chunks")])
@pytest.mark.parametrize("way", ["together", "in chunks"])
def test_a_request_says_what_it_would_alone(name: str, way: str) -> None:
    check(name, "bfloat16", way)


# Every arithmetic with every model, each with two of the ways: so every way meets every model and every arithmetic. Of
# latents there is no cache in int8: they have a test of their own.
ARITHMETICS = ("float32", "4 bits", "int8 cache")
WITHOUT_LATENTS = [name for name in MODELS if name != "latents"]
TRIPLES = [
    (name, arithmetic, [list(WAYS)[(2 * (number + place) + i) % len(WAYS)] for i in range(2)])
    for number, arithmetic in enumerate(ARITHMETICS)
    for place, name in enumerate(WITHOUT_LATENTS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arithmetic", "ways"), TRIPLES)
def test_whatever_becomes_of_it(name: str, arithmetic: str, ways: list[str]) -> None:
    for way in ways:
        check(name, arithmetic, way)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["float32", "4 bits"])
def test_whatever_becomes_of_latents(arithmetic: str) -> None:
    for way in WAYS:
        check("latents", arithmetic, way)


def test_every_way_meets_every_model_and_every_arithmetic() -> None:
    met = [(name, arithmetic, way) for name, arithmetic, ways in TRIPLES for way in ways]
    assert {(name, way) for name, _, way in met} == {(name, way) for name in WITHOUT_LATENTS for way in WAYS}
    assert {(kind, way) for _, kind, way in met} == {(kind, way) for kind in ARITHMETICS for way in WAYS}
