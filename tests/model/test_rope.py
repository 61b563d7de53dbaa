from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.core.model_config import RopeScaling
from penstock.model.rope import inverse_frequencies, rope_tables
from tests.model.tiny import LLAMA3_ROPE, SHAPE, model_config

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
}


@pytest.mark.parametrize("kind", ROPES)
def test_tables_are_those_of_transformers(kind: str) -> None:
    hf = LlamaConfig(**(SHAPE | {"head_dim": 64}), rope_parameters=ROPES[kind])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(hf.max_position_embeddings).unsqueeze(0))
    rope = rope_tables(model_config(hf), torch.device("cpu"))
    torch.testing.assert_close(torch.cat((rope.cos, rope.cos), dim=-1), cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat((rope.sin, rope.sin), dim=-1), sin[0], atol=1e-5, rtol=0)


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(8, 10_000.0, None)
    scaled = inverse_frequencies(8, 10_000.0, RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0)))
    torch.testing.assert_close(plain / scaled, torch.tensor([1.0, 2.0, 4.0, 8.0]))
