from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.core.model_config import RopeScaling
from penstock.hub.hf_config import model_config
from penstock.model.rope import inverse_frequencies, paired_rows, rope_tables
from tests.model.tiny import LLAMA3_ROPE, SHAPE, YARN

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn, truncated": YARN | {"truncate": True, "rope_theta": 10_000.0},
    "yarn, as DeepSeek's": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize("kind", ROPES)
def test_tables_are_those_of_transformers(kind: str) -> None:
    hf = LlamaConfig(**(SHAPE | {"head_dim": 64}), rope_parameters=ROPES[kind])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(hf.max_position_embeddings).unsqueeze(0))
    rope = rope_tables(model_config(hf.to_dict(), {}, has_head=True), torch.device("cpu"))
    torch.testing.assert_close(torch.cat((rope.cos, rope.cos), dim=-1), cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat((rope.sin, rope.sin), dim=-1), sin[0], atol=1e-5, rtol=0)


SHORT, LONG = [1.0, 1.1, 1.2, 1.5, 2.0, 2.5], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


@pytest.mark.parametrize(("max_context", "length"), [(16, 16), (17, 17), (None, 128)])
def test_phi_has_one_set_of_factors_for_every_sequence(max_context: int | None, length: int) -> None:
    """Where contexts may be longer than the original's 16 tokens, that for long ones; transformers changes midway."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "short_factor": SHORT,
        "long_factor": LONG,
    }
    hf = Phi3Config(**SHAPE, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=16)
    cos, sin = Phi3RotaryEmbedding(hf)(torch.zeros(1), torch.arange(length).unsqueeze(0))
    ours = rope_tables(model_config(hf.to_dict(), {}, has_head=True), torch.device("cpu"), max_context)
    torch.testing.assert_close(ours.cos[:length, :6], cos[0, :, :6], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.sin[:length, :6], sin[0, :, :6], atol=1e-5, rtol=0)
    assert ours.cos[:, 6:].eq(1.0).all()  # these do not turn
    assert ours.sin[:, 6:].eq(0.0).all()


def test_rows_of_a_head_that_turns_in_part_lie_so_that_halves_are_pairs() -> None:
    assert paired_rows(8, 4).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert paired_rows(8, 8).tolist() == list(range(8))


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(8, 10_000.0, None)
    scaled = inverse_frequencies(8, 10_000.0, RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0)))
    torch.testing.assert_close(plain / scaled, torch.tensor([1.0, 2.0, 4.0, 8.0]))
