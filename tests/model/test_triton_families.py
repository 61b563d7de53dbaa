"""Every family's logits by Triton's kernels equal the plain reference's on the CPU, prompts and decodes together; on a
GPU, or on none interpreted. The same models in the engine's own loop: tests/runner/test_cuda_families.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.model.loading import load_model
from penstock.model.ops import Ops
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.random_weights import RandomCheckpoint
from tests.devices import DEVICE, matrix, slow
from tests.interpreter import quick_interpreter as quick_interpreter
from tests.model.family_configs import CONFIGS
from tests.model.paged import PagedDriver

# As others go, when they are interpreted.
SAME_WAYS = {
    "qwen3-moe",
    "qwen3-next",
    "phi3",
    "phi4-long",
    "deepseek-v2",
    "glm4",
    "glm4-moe",
    "granite-moe",
    "olmo2",
    "olmoe",
    "exaone4",
    "ministral3",
}


@pytest.mark.parametrize("family", matrix(list(CONFIGS), [slow(name) for name in CONFIGS if name not in SAME_WAYS]))
def test_logits_are_the_references(family: str) -> None:
    ours, theirs = (logits(family, ops) for ops in (TritonOps(DEVICE, torch.float32), ReferenceOps()))
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-4, rtol=1e-4)


def logits(family: str, ops: Ops) -> Tensor:
    driver = PagedDriver(load_model(RandomCheckpoint(CONFIGS[family]), ops), ops, block_size=16)
    long, short = driver.sequence(range(5, 60)), driver.sequence(range(100, 122))
    counts = matrix([(40, 20), (1, 1), (14, 1)], [(28, 3), (1, 1)])
    steps = [[(long, of_long), (short, of_short)] for of_long, of_short in counts]
    return torch.cat([driver.step(work) for work in steps])
