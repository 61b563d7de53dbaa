"""What `penstock quantize` writes, loaded by transformers: it says what we say, in every family.

Of the layouts, compressed-tensors' is the one that transformers reads on a CPU; its package is needed for tests alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.quant.quality import walked
from penstock.quant.recipe import MethodName, make_recipe
from penstock.quant.walk import LAYERS
from tests.hub.families import FAMILIES
from tests.hub.more_families import MORE
from tests.quant.test_job import CPU, run, saved

pytestmark = pytest.mark.slow

MIXTURES = {"mixtral", "qwen2_moe", "qwen3_moe"}
ALL = {name: config for name, config in (FAMILIES | MORE).items() if config.model_type in LAYERS}
TOKENS = list(range(3, 43))
CASES: list[tuple[MethodName, int | None, str, float]] = [
    *(("int8", 32, family, 1e-3) for family in ALL),
    *(("fp8", None, family, 1e-3) for family in ALL.keys() - MIXTURES),
    # It does not round what experts are given, and we do.
    *(("fp8", None, family, 0.12) for family in sorted(MIXTURES)),
    # Half a step between its scale of a row and ours. Of experts it does not read this format.
    *(("int8", None, family, 0.06) for family in ALL.keys() - MIXTURES),
]


@pytest.mark.parametrize(("method", "group", "family", "tolerance"), sorted(CASES, key=str))
def test_transformers_says_what_we_say(
    method: MethodName, group: int | None, family: str, tolerance: float, tmp_path: Path
) -> None:
    original = saved(ALL[family], tmp_path / "original")
    recipe = make_recipe(original.config, method, group=group)
    made = run(original, recipe, tmp_path / "made")
    ((ours, _),) = walked(made, torch.tensor([TOKENS]), CPU, lambda *_: None).outputs()
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32))
    assert float((ours - theirs).norm() / theirs.norm()) < tolerance


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found
