"""What an adapted model says is what PEFT makes of the same adapter, however requests for several are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from penstock.hub.peft import read_peft
from penstock.model.loading import load_model
from penstock.model.lora import with_adapters
from penstock.model.ops.reference import ReferenceOps
from penstock.model.weights import Site
from tests.model.test_lora import logits_of
from tests.model.tiny import StateDictCheckpoint, hf_model

PROMPT = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(3)).tolist()
OPTIONS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 8, "lora_alpha": 24, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\.down_proj": 12},
        "alpha_pattern": {"self_attn.q_proj": 16},
    },
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("options", OPTIONS)
def test_logits_are_those_of_peft(tmp_path: Path, family: str, options: str) -> None:
    theirs = hf_model(family)
    ours, sites, ops = StateDictCheckpoint(hf_model(family)), list[Site](), ReferenceOps()
    torch.manual_seed(1)
    tuned = peft.get_peft_model(theirs, peft.LoraConfig(**OPTIONS[options], init_lora_weights=False))
    tuned.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = tuned(torch.tensor([PROMPT])).logits[0]
        with tuned.disable_adapter():
            base = tuned(torch.tensor([PROMPT])).logits[0]
    model = with_adapters(load_model(ours, ops, sites=sites), sites, ops, num_slots=1)
    model.bank.place(0, model.bank.fit(read_peft(tmp_path)))
    found, plain = logits_of(model, ops, [(PROMPT, 0), (PROMPT, None)])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(plain, base, atol=2e-3, rtol=1e-3)
    assert (found - plain).abs().max() > 1.0, "the adapter makes no difference"
