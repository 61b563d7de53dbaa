"""Every family on a GPU, in overlapped steps and captured graphs: each token is one that the float32 reference on the
CPU might have chosen. What they bring is in the sizes here: caps and windows, parts of heads rotated, heads of Phi-3's
and Gemma's sizes, experts that are chosen by many, few and nobody."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.core.model_config import Experts, ModelConfig, RopeScaling
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.model.random_weights import RandomCheckpoint
from tests.runner.clients import Clients, one_after_the_other, serve
from tests.runner.devices import NEEDS_GPU, assembled
from tests.runner.judge import Judge

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=400,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    context_length=256,
)
GEMMA = replace(
    SHAPE,
    head_dim=256,
    windows=(20, None),
    query_scale=0.11,
    activation="gelu",
    norm_offset=1.0,
    embedding_scale=11.3,
    tied_embeddings=True,
)
PHI = replace(SHAPE, architecture="phi3", head_dim=96)
FACTORS = tuple(1.0 + 0.25 * i for i in range(36))
LONG = RopeScaling("longrope", original_context=64, factors=FACTORS, long_factors=FACTORS, magnitude=1.1)
CONFIGS = {
    "mixtral": replace(SHAPE, architecture="mixtral", experts=Experts(8, 2, 192)),
    "qwen2-moe": replace(
        SHAPE,
        architecture="qwen2_moe",
        attention_bias=True,
        experts=Experts(12, 4, 96, normalized=False, shared_intermediate_size=160, dense_layers=(1,)),
    ),
    "qwen3-moe": replace(SHAPE, architecture="qwen3_moe", experts=Experts(40, 8, 64)),
    "gemma2": replace(GEMMA, architecture="gemma2", attention_cap=3.0, logit_cap=5.0),
    "gemma3": replace(GEMMA, architecture="gemma3_text", local_rope_theta=100.0),
    "phi3": replace(PHI, windows=(24, 24)),
    "phi4": replace(PHI, head_dim=128, rotary_dim=96),
    "phi4-long": replace(PHI, rotary_dim=72, rope_scaling=LONG),
}


def requests() -> list[Request]:
    """More at a time than the kernels for a few rows take, then fewer and fewer."""
    source = random.Random(3)
    shared = source.choices(range(400), k=40)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=shared[: source.choice([0, 16, 40])] + source.choices(range(400), k=source.randint(1, 80)),
            max_tokens=2 + 2 * i,
            sampling=SamplingParams(temperature=0.0, num_logprobs=2),
        )
        for i in range(22)
    ]


@NEEDS_GPU
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_token_is_the_references(family: str) -> None:
    config = CONFIGS[family]
    made = assembled(config, "cuda", block_size=16, max_num_seqs=24)
    clients = Clients(one_after_the_other(requests(), apart=0))
    serve(made, clients, num_blocks=400)
    assert len(clients.finished) == len(requests())
    undecided = Judge(RandomCheckpoint(config), longest=config.context_length).check_all(clients)
    assert undecided <= 0.02 * clients.stats.generated_tokens, "the rule forgives too much"
