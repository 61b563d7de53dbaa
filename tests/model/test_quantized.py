"""Quantized weights: what they stand for, how they join, and that a model of any stored format says what the model of
the numbers it stands for says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.hub.convert import hf_config
from penstock.hub.hf import HFCheckpoint
from penstock.hub.safetensors_file import write_safetensors
from penstock.model.loading import load_model
from penstock.model.ops.reference import ReferenceOps
from penstock.model.quantized import Weight, joined, plain
from penstock.model.quantized.grouped import Bits, GroupedWeight, packed, unpacked
from penstock.model.weights import read_stored
from penstock.quant import Quant, quant_of, to_quant
from tests.hub.integer_checkpoints import LAYOUTS, write_integers
from tests.model.paged import PagedDriver

CPU = torch.device("cpu")
PROMPT = list(range(3, 23))
# How far from the plain weight, relative to its size: the steps of a format are this coarse.
LOSSES: dict[Quant, float] = {"none": 0.0, "fp8": 0.04, "int8": 0.01, "w8a8": 0.015, "int4": 0.15}


def weight(out: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@given(st.integers(1, 5), st.integers(1, 9))
def test_packing_is_undone_by_unpacking(rows: int, pairs: int) -> None:
    values = torch.randint(0, 16, (rows, 2 * pairs), dtype=torch.uint8)
    assert torch.equal(unpacked(packed(values)), values)


@pytest.mark.parametrize("quant", LOSSES)
@pytest.mark.parametrize("columns", [256, 576, 40])
def test_quantizing_at_load_time_loses_little(quant: Quant, columns: int) -> None:
    plain_weight = weight(32, columns)
    kept = to_quant(quant, plain_weight)
    assert quant_of(kept) == quant
    assert kept.shape == plain_weight.shape
    assert relative_error(plain(kept), plain_weight) <= LOSSES[quant]
    assert to_quant(quant, kept) is kept


@pytest.mark.parametrize("quant", ["fp8", "int8", "w8a8", "int4"])
def test_a_group_of_zeros_stays_zero(quant: Quant) -> None:
    assert plain(to_quant(quant, torch.zeros(4, 256))).abs().max() == 0


@pytest.mark.parametrize("quant", ["fp8", "int8", "w8a8", "int4"])
def test_parts_of_one_format_join_in_it(quant: Quant) -> None:
    parts: list[Weight] = [to_quant(quant, weight(16 * size, 256, size)) for size in (1, 2, 3)]
    together = joined(parts)
    assert quant_of(together) == quant
    assert torch.equal(plain(together), torch.cat([plain(part) for part in parts]))


def test_parts_of_several_formats_join_in_plain_numbers() -> None:
    parts: list[Weight] = [to_quant(quant, weight(16, 256)) for quant in ("int4", "int8", "fp8", "none")]
    together = joined(parts)
    assert isinstance(together, Tensor)
    assert torch.equal(together, torch.cat([plain(part) for part in parts]))


def test_parts_in_different_orders_of_columns_do_not_join() -> None:
    values, scales = packed(torch.randint(0, 16, (8, 64), dtype=torch.uint8)), torch.rand(8, 2)
    parts: list[Weight] = [GroupedWeight(values, 4, scales, order=torch.randperm(64)) for _ in range(2)]
    assert isinstance(joined(parts), Tensor)


def test_symmetric_and_asymmetric_parts_join() -> None:
    values, scales = packed(torch.randint(0, 16, (8, 64), dtype=torch.uint8)), torch.rand(8, 2)
    parts: list[Weight] = [
        GroupedWeight(values, 4, scales),
        GroupedWeight(values, 4, scales, zeros=torch.randint(0, 16, (8, 2), dtype=torch.uint8)),
    ]
    together = joined(parts)
    assert isinstance(together, GroupedWeight)
    assert torch.equal(plain(together), torch.cat([plain(part) for part in parts]))


def integers(bits: Bits, groups: int, kind: str) -> GroupedWeight:
    """[8, 96]"""
    values = torch.randint(0, 1 << bits, (8, 96), dtype=torch.uint8)
    return GroupedWeight(
        packed(values) if bits == 4 else values,
        bits,
        torch.rand(8, groups).half(),
        torch.randint(0, 1 << bits, (8, groups), dtype=torch.uint8) if kind == "zeros" else None,
        torch.randn(8, groups).half() if kind == "minimums" else None,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([4, 8]), st.sampled_from([1, 3, 6]), st.sampled_from(["middle", "zeros", "minimums"])
        ),
        min_size=2,
        max_size=3,
    )
)
def test_integers_of_several_sizes_join_in_the_finest_of_them(kinds: list[tuple[Bits, int, str]]) -> None:
    parts: list[Weight] = [integers(*kind) for kind in kinds]
    together = joined(parts)
    assert isinstance(together, GroupedWeight)
    assert together.bits == max(bits for bits, _, _ in kinds)
    assert together.scales.shape[1] == max(groups for _, groups, _ in kinds)
    torch.testing.assert_close(plain(together), torch.cat([plain(part) for part in parts]))


@settings(max_examples=20)
@given(st.sampled_from([4, 8]), st.sampled_from(["middle", "zeros", "minimums"]))
def test_offsets_are_what_a_group_adds_to_values_that_count_from_the_middle(bits: Bits, kind: str) -> None:
    values = torch.randint(0, 1 << bits, (6, 96), dtype=torch.uint8)
    one = GroupedWeight(
        packed(values) if bits == 4 else values,
        bits,
        torch.rand(6, 3),
        torch.randint(0, 1 << bits, (6, 3), dtype=torch.uint8) if kind == "zeros" else None,
        torch.randn(6, 3) if kind == "minimums" else None,
    )
    offsets = one.offsets()
    counted = (values.float() - (1 << (bits - 1))).view(6, 3, 32) * one.scales[:, :, None]
    again = counted if offsets is None else counted + offsets[:, :, None]
    torch.testing.assert_close(again.view(6, 96), one.dequantized())


def test_rows_of_an_embedding_are_those_of_the_table() -> None:
    table = to_quant("int4", weight(20, 256))
    ids = torch.tensor([3, 19, 3])
    assert not isinstance(table, Tensor)
    assert torch.equal(table.rows(ids).dequantized(), table.dequantized()[ids])


def logits(checkpoint: HFCheckpoint) -> Tensor:
    ops = ReferenceOps()
    return PagedDriver(load_model(checkpoint, ops), ops, block_size=4).prefill(PROMPT)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_says_what_the_numbers_say_that_its_integers_stand_for(name: str, tmp_path: Path) -> None:
    expected = write_integers(tmp_path / "small", LAYOUTS[name])
    small = HFCheckpoint(tmp_path / "small")
    for tensor, values in expected.items():
        kept = plain(read_stored(small, tensor, CPU)).float()
        np.testing.assert_allclose(kept.numpy(), values.numpy(), rtol=1e-5, atol=1e-6, err_msg=tensor)
    found = logits(small)
    wide = tmp_path / "wide"
    wide.mkdir()
    arrays = [(tensor, values.numpy()) for tensor, values in expected.items()]
    write_safetensors(wide / "model.safetensors", arrays, len(arrays), "float32")
    (wide / "config.json").write_text(json.dumps(hf_config(small.config, "float32")))
    torch.testing.assert_close(found, logits(HFCheckpoint(wide)), rtol=1e-4, atol=1e-4)
