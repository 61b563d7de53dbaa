"""Every family gives Hugging Face's logits, however its tokens are cut into steps and its cache into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.model.layers import CausalLM
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from tests.model.paged import PagedDriver
from tests.model.tiny import CONFIGS, StateDictCheckpoint, hf_model

PROMPT = torch.randint(0, 256, (23,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(2)).tolist()


@dataclass(frozen=True)
class Pair:
    theirs: PreTrainedModel
    ours: CausalLM
    ops: ReferenceOps

    def expected(self, token_ids: list[int]) -> Tensor:
        return self.theirs(torch.tensor([token_ids])).logits[0]

    def driver(self, block_size: int = 4) -> PagedDriver:
        return PagedDriver(self.ours, self.ops, block_size=block_size)


# What these bring is also in one of the others.
SLOW = (
    "mixtral",
    "qwen3-moe",
    "phi3",
    "phi4",
    "deepseek-v2",
    "deepseek-v2-groups",
    "glm-4.7-flash",
    "llama4-dense",
    "glm",
    "glm4",
    "granite",
    "granite-moe",
    "granite-4",
    "granite-4-nope",
    "olmo2",
    "olmoe",
    "exaone4",
    "exaone4-small",
    "seed-oss",
    "smollm3",
    "dots1",
    "ernie4.5",
    "ministral3",
    "qwen3-next",
    "qwen3.5-moe",
)
PARAMS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CONFIGS]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request: pytest.FixtureRequest) -> Pair:
    theirs, ops = hf_model(request.param), ReferenceOps()
    return Pair(theirs, load_model(StateDictCheckpoint(theirs), ops), ops)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Keys of linear attention are made as long as one another: where they were short, rounding is larger."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)


def test_whole_prompt_at_once(pair: Pair) -> None:
    assert_close(pair.driver().prefill(PROMPT), pair.expected(PROMPT))


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 4), (3, 16), (7, 4), (7, 16)])
def test_chunked_prompt(pair: Pair, chunk: int, block_size: int) -> None:
    assert_close(pair.driver(block_size).prefill(PROMPT, chunk), pair.expected(PROMPT))


def test_mixed_batch_with_a_shared_prefix(pair: Pair) -> None:
    driver = pair.driver(block_size=4)
    first = driver.sequence(PROMPT)
    driver.step([(first, 20)])
    # It computes nothing of its first 12 tokens, unless its layers have states that nobody kept.
    twin = driver.sequence(PROMPT[:12] + OTHER, shares=first, blocks=0 if pair.ours.config.linear else 3)
    if pair.ours.config.linear:
        driver.step([(twin, 12)])
    fresh = driver.sequence(OTHER)
    expected_first, expected_twin, expected_fresh = map(pair.expected, (first.token_ids, twin.token_ids, OTHER))

    logits = driver.step([(twin, 5), (first, 1), (fresh, 9)])
    assert_close(logits, torch.stack((expected_twin[16], expected_first[20], expected_fresh[8])))
    logits = driver.step([(first, 1), (fresh, 1), (twin, 1)])  # nothing but decodes, of unequal contexts
    assert_close(logits, torch.stack((expected_first[21], expected_fresh[9], expected_twin[17])))
    logits = driver.step([(fresh, 7), (twin, 7), (first, 1)])  # two chunks of one length
    assert_close(logits, torch.stack((expected_fresh[16], expected_twin[24], expected_first[22])))


def test_greedy_generation(pair: Pair) -> None:
    """Each token is Hugging Face's best after those before it, so by induction all are what it would generate."""
    found = pair.driver().greedy(PROMPT, 20)
    assert pair.expected([*PROMPT, *found])[len(PROMPT) - 1 : -1].argmax(dim=1).tolist() == found
