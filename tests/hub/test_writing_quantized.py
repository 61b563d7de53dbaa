"""Quantized weights as files have them: what is written is what is read, and what the writers of public ones write."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hub.awq import Awq, awq_config, awq_tensors
from penstock.hub.compressed_integers import (
    CompressedIntegers,
    compressed_config,
    packed_tensors,
    scheme_entry,
    w8a8_tensors,
)
from penstock.hub.gptq import Gptq, gptq_config, gptq_tensors
from penstock.hub.quantization import Tensors, pack_words, unpack_words
from penstock.hub.safetensors_file import TensorInfo, Written
from penstock.hub.schemes import read_scheme
from penstock.hub.stored import GroupedTensor, StoredTensor, packed
from tests.hub import integer_checkpoints as theirs

NAME = "model.layers.0.self_attn.q_proj.weight"


def tensors(written: dict[str, Written]) -> Tensors:
    """As if a file had them."""
    infos = {name: TensorInfo(one.values.shape, one.code, 0, 0) for name, one in written.items()}
    return Tensors(
        infos,
        lambda name: StoredTensor(np.ascontiguousarray(written[name].values), written[name].code),  # type: ignore[arg-type]
        lambda name: np.ascontiguousarray(written[name].values),
    )


@st.composite
def weights(draw: st.DrawFn, bits: Literal[4, 8], *, zeros: bool, ordered: bool) -> GroupedTensor:
    group = draw(st.sampled_from([8, 16, 32]))
    groups, rows = draw(st.integers(1, 4)), 8 * draw(st.integers(1, 4))
    dice = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    values = dice.integers(0, 1 << bits, (rows, groups * group)).astype(np.uint8)
    return GroupedTensor(
        packed(values) if bits == 4 else values,
        bits,
        StoredTensor(dice.normal(0, 0.01, (rows, groups)).astype(np.float16), "F16"),
        dice.integers(1, 1 << bits, (rows, groups)).astype(np.uint8) if zeros and draw(st.booleans()) else None,
        order=dice.permutation(groups * group) if ordered and draw(st.booleans()) else None,
    )


@settings(max_examples=40)
@given(st.data(), st.sampled_from([4, 8]))
def test_gptq_reads_what_it_writes(data: st.DataObject, bits: Literal[4, 8]) -> None:
    weight = data.draw(weights(bits, zeros=True, ordered=True))
    config = gptq_config(bits=bits, group=32, symmetric=weight.zeros is None, act_order=weight.order is not None)
    scheme = read_scheme(config)
    assert isinstance(scheme, Gptq)
    found = tensors(gptq_tensors(NAME, weight))
    scheme.check(found.infos)
    np.testing.assert_array_equal(scheme.stored(NAME, found).widened(), weight.widened())


@settings(max_examples=40)
@given(weights(4, zeros=True, ordered=False))
def test_awq_reads_what_it_writes(weight: GroupedTensor) -> None:
    scheme = read_scheme(awq_config(group=32))
    assert isinstance(scheme, Awq)
    found = tensors(awq_tensors(NAME, weight))
    scheme.check(found.infos)
    np.testing.assert_array_equal(scheme.stored(NAME, found).widened(), weight.widened())


@settings(max_examples=40)
@given(weights(8, zeros=False, ordered=False))
def test_packed_integers_are_read_as_they_are_written(weight: GroupedTensor) -> None:
    scheme = read_scheme(compressed_config("pack-quantized", scheme_entry("int", "group", group=32), None))
    assert isinstance(scheme, CompressedIntegers)
    found = tensors(packed_tensors(NAME, weight))
    scheme.check(found.infos)
    np.testing.assert_array_equal(scheme.stored(NAME, found).widened(), weight.widened())


@pytest.mark.parametrize(
    ("kind", "code", "format"), [("int", "I8", "int-quantized"), ("float", "F8_E4M3", "float-quantized")]
)
def test_rows_with_a_scale_are_read_as_they_are_written(kind: str, code: Literal["I8", "F8_E4M3"], format: str) -> None:
    dice = np.random.default_rng(0)
    values = dice.integers(-100, 100, (16, 24)).astype(np.int8).view(np.int8 if code == "I8" else np.uint8)
    weight = StoredTensor(values, code, scales=dice.uniform(0.01, 0.1, 16).astype(np.float32))
    inputs = scheme_entry(kind, "token", dynamic=True)
    scheme = read_scheme(compressed_config(format, scheme_entry(kind, "channel"), inputs))
    found = tensors(w8a8_tensors(NAME, weight))
    scheme.check(found.infos)
    assert scheme.quantization == ("w8a8" if code == "I8" else "fp8")
    np.testing.assert_array_equal(scheme.stored(NAME, found).widened(), weight.widened())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_the_words_are_those_of_public_checkpoints(bits: Literal[4, 8], ordered: bool) -> None:
    """Against the slow, plain packing that the readers are tested with."""
    one = theirs.integers(16, 64, bits, 16, symmetric=False, ordered=ordered, seed=3)
    order = np.argsort(one.groups, kind="stable")
    values = one.values[:, order].astype(np.uint8)
    weight = GroupedTensor(
        packed(values) if bits == 4 else values,
        bits,
        StoredTensor(one.scales, "F16"),
        one.zeros.astype(np.uint8),
        order=order if ordered else None,
    )
    expected = theirs.gptq(one, bits)
    for part, found in gptq_tensors(NAME, weight).items():
        np.testing.assert_array_equal(found.values, expected[part.removeprefix(NAME.removesuffix("weight"))])
    if bits == 4 and not ordered:
        expected = theirs.awq(one, bits)
        for part, found in awq_tensors(NAME, weight).items():
            np.testing.assert_array_equal(found.values, expected[part.removeprefix(NAME.removesuffix("weight"))])


@settings(max_examples=40)
@given(st.sampled_from([4, 8]), st.integers(1, 3), st.integers(1, 40), st.sampled_from([0, 1]), st.integers(0, 1000))
def test_words_hold_what_was_packed(bits: int, rows: int, columns: int, axis: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns) if axis else (columns, rows))
    found = unpack_words(pack_words(values, bits, axis), bits, axis)
    np.testing.assert_array_equal(found[:, :columns] if axis else found[:columns], values)
