"""Adapters over a loaded model: what they make of it is what merging them into its weights would, and a row's result
does not depend on whose rows are beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import ModelConfig
from penstock.hub.peft import LowRank, PeftAdapter, read_peft
from penstock.hub.stored import StoredTensor
from penstock.model.batch import SlotRows
from penstock.model.loading import load_model
from penstock.model.lora import AdaptedModel, with_adapters
from penstock.model.ops import Ops
from penstock.model.ops.build import KernelsUnavailable
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.weights import Site
from tests.model.lora import ATTENTION, merged, write_adapter
from tests.model.paged import PagedDriver, make_batch, with_states
from tests.model.tiny import CONFIGS, ArrayCheckpoint, StateDictCheckpoint, hf_model

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=131,
    hidden_size=72,
    intermediate_size=104,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    context_length=64,
    attention_bias=True,
)
SHORT, LONG, OTHER = [5, 7, 11, 13, 17], list(range(20, 41)), [3, 1, 4, 1, 5, 9]


@cache
def make_ops(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    try:
        return NativeOps(name, threads=2)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@cache
def tensors() -> dict[str, object]:
    random = RandomCheckpoint(CONFIG)
    return {name: random.tensor(name) for name in random.tensor_names()}


def adapted(ops: Ops, num_slots: int = 3) -> AdaptedModel:
    sites: list[Site] = []
    model = load_model(ArrayCheckpoint(CONFIG, tensors()), ops, sites=sites)  # type: ignore[arg-type]
    return with_adapters(model, sites, ops, num_slots)


def logits_of(model: AdaptedModel, ops: Ops, work: list[tuple[list[int], int | None]]) -> list[Tensor]:
    """Of every token of each prompt, all in one step; each with the adapter in its slot, or none."""
    driver = PagedDriver(model, ops, block_size=4)
    sequences = [driver.sequence(prompt) for prompt, _ in work]
    for sequence in sequences:
        while len(sequence.blocks) * 4 < len(sequence.token_ids):
            sequence.blocks.append(driver._free.pop())
    lengths = [(s, len(s.token_ids)) for s in sequences]
    batch = with_states(make_batch(lengths, every_row=True), lengths, driver.states)
    rows: dict[int, list[int]] = {}
    start = 0
    for prompt, slot in work:
        if slot is not None:
            rows.setdefault(slot, []).extend(range(start, start + len(prompt)))
        start += len(prompt)
    groups = tuple(SlotRows(slot, torch.tensor(found)) for slot, found in rows.items())
    with torch.inference_mode():
        logits = model(replace(batch, adapters=groups), driver.kv).float()
    return list(logits.split_with_sizes([len(prompt) for prompt, _ in work]))


def merged_logits(adapter: PeftAdapter, ops: Ops, prompt: list[int]) -> Tensor:
    model = load_model(ArrayCheckpoint(CONFIG, merged(tensors(), adapter)), ops)  # type: ignore[arg-type]
    return PagedDriver(model, ops, block_size=4).prefill(prompt)


@pytest.mark.parametrize("ops_name", ["reference", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 8},
        {"rank": 1, "lora_alpha": 3},
        {"rank": 64, "use_rslora": True, "lora_alpha": 16},
        {"rank": 4, "targets": ["q_proj", "v_proj"], "dtype": "bfloat16"},
        {"rank": 8, "ranks": {"v_proj": 3, "down_proj": 17}, "alpha_pattern": {"layers.1.mlp.up_proj": 2.5}},
        {"rank": 256, "targets": ["k_proj", "gate_proj", "o_proj"], "dtype": "float16"},
    ],
    ids=["every linear", "rank 1", "rslora", "some", "patterns", "rank 256"],
)
def test_output_is_that_of_merged_weights(tmp_path: Path, ops_name: str, options: dict[str, object]) -> None:
    ops = make_ops(ops_name)
    adapter = read_peft(write_adapter(tmp_path / "a", CONFIG, **options))  # type: ignore[arg-type]
    model = adapted(ops)
    model.bank.place(1, model.bank.fit(adapter))
    (found,) = logits_of(model, ops, [(LONG, 1)])
    expected = merged_logits(adapter, ops, LONG)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    (base,) = logits_of(model, ops, [(LONG, None)])
    assert (base - expected).abs().max() > 0.1, "the adapter makes no difference"


@pytest.mark.parametrize("ops_name", ["float32", "bfloat16", "bfloat16_dot"])
def test_rows_are_the_same_to_the_bit_whoever_is_beside_them(tmp_path: Path, ops_name: str) -> None:
    ops = make_ops(ops_name)
    model = adapted(ops)
    for slot in range(3):
        options = {"seed": slot, "rank": 4 + 7 * slot, "targets": ATTENTION if slot == 1 else ("down_proj", "q_proj")}
        path = write_adapter(tmp_path / str(slot), CONFIG, **options)  # type: ignore[arg-type]
        model.bank.place(slot, model.bank.fit(read_peft(path)))
    together: list[tuple[list[int], int | None]] = [
        (SHORT, 0),
        (LONG, None),
        (LONG, 2),
        (OTHER, 1),
        (SHORT, 2),
        (SHORT, None),
        (LONG, 0),
    ]
    for work, found in zip(together, logits_of(model, ops, together), strict=True):
        assert torch.equal(logits_of(model, ops, [work])[0], found)
    plain = PagedDriver(model.plain, ops, block_size=4).prefill(LONG)
    assert torch.equal(plain, logits_of(model, ops, together)[1]), "the base model's rows are those of the base model"


@pytest.mark.parametrize("family", CONFIGS)
def test_every_linear_of_every_family_can_be_adapted(family: str) -> None:
    ops, sites = make_ops("reference"), list[Site]()
    checkpoint = StateDictCheckpoint(hf_model(family))
    model = with_adapters(load_model(checkpoint, ops, sites=sites), sites, ops, num_slots=1)
    dice = np.random.default_rng(3)

    def drawn(*shape: int) -> StoredTensor:
        return StoredTensor(dice.normal(0.0, shape[1] ** -0.5, shape).astype(np.float32), "F32")

    layers = {
        name: LowRank(drawn(3, site.inputs), drawn(size, 3), 0.3)
        for site in sites
        for name, size in site.outputs.items()
    }
    adapter = PeftAdapter(Path("drawn"), "digest", "", layers)
    model.bank.place(0, model.bank.fit(adapter))
    found, base = logits_of(model, ops, [(LONG, 0), (LONG, None)])
    expected = load_model(ArrayCheckpoint(checkpoint.config, merged(checkpoint.tensors, adapter)), ops)
    torch.testing.assert_close(found, PagedDriver(expected, ops, block_size=4).prefill(LONG), atol=2e-3, rtol=2e-3)
    assert (found - base).abs().max() > 0.1, "the adapter makes no difference"


def test_slot_holds_what_was_put_there_last(tmp_path: Path) -> None:
    ops = make_ops("reference")
    model = adapted(ops)
    first, second = (
        model.bank.fit(read_peft(write_adapter(tmp_path / str(seed), CONFIG, seed=seed, targets=targets)))
        for seed, targets in ((1, ("q_proj",)), (2, ("down_proj",)))
    )
    model.bank.place(0, second)
    (expected,) = logits_of(model, ops, [(LONG, 0)])
    model.bank.place(0, first)
    assert not torch.equal(logits_of(model, ops, [(LONG, 0)])[0], expected)
    model.bank.place(0, second)
    assert torch.equal(logits_of(model, ops, [(LONG, 0)])[0], expected)
    model.bank.clear(0)
    assert torch.equal(logits_of(model, ops, [(LONG, 0)])[0], logits_of(model, ops, [(LONG, None)])[0])


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    bank = adapted(make_ops("reference")).bank
    wider = write_adapter(tmp_path / "wider", replace(CONFIG, hidden_size=80), targets=("o_proj",))
    with pytest.raises(ModelUnsupported, match=r"for another model: its model.layers.0.self_attn.o_proj is \[80, 96\]"):
        bank.fit(read_peft(wider))
    deeper = write_adapter(tmp_path / "deeper", replace(CONFIG, num_layers=3), targets=("o_proj",))
    with pytest.raises(ModelUnsupported, match=r"adapts model.layers.2.self_attn.o_proj, which is no linear layer"):
        bank.fit(read_peft(deeper))


def test_batch_without_adapters_runs_the_layers_as_they_were_loaded() -> None:
    model = adapted(make_ops("reference"))
    assert model.plain is not model.adapted
    calls: list[str] = []
    watched = replace(model, adapted=lambda batch, kv: calls.append("adapted"))  # type: ignore[arg-type]
    PagedDriver(watched, make_ops("reference"), block_size=4).prefill(SHORT)
    assert calls == []
