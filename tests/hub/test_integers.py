"""GPTQ, AWQ and compressed-tensors: integers are read as their writers packed them, and what is not understood is
refused by the name of its field."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.core.errors import ModelUnsupported
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_directory import HFDirectory
from penstock.hub.stored import GroupedTensor
from tests.hub.fp8_checkpoints import edit_config, weights_file
from tests.hub.integer_checkpoints import LAYOUTS, PER_TOKEN, compressed, write_integers

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


Written = Callable[[str], tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A directory of each layout, for tests that only read, and the weights that are in it."""

    @cache
    def write(name: str) -> tuple[Path, dict[str, Tensor]]:
        path = tmp_path_factory.mktemp("layout")
        return path, write_integers(path, LAYOUTS[name])

    return write


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_weight_is_what_its_integers_stand_for(name: str, written: Written) -> None:
    path, expected = written(name)
    checkpoint = HFCheckpoint(path)
    assert checkpoint.tensor_names() >= expected.keys()
    for tensor, weight in expected.items():
        np.testing.assert_allclose(checkpoint.tensor(tensor), weight.numpy(), rtol=1e-6, atol=1e-7, err_msg=tensor)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_directory_says_how_its_weights_are_kept(name: str, written: Written) -> None:
    path, _ = written(name)
    assert HFCheckpoint(path).config.quantization == LAYOUTS[name].kept_as
    assert HFDirectory(path).config.quantization == LAYOUTS[name].kept_as


def test_symmetric_weights_need_no_zero_points(written: Written) -> None:
    stored = HFCheckpoint(written("GPTQ, symmetric")[0]).stored(Q_PROJ)
    assert isinstance(stored, GroupedTensor)
    assert stored.zeros is None
    assert stored.values.nbytes * 2 == stored.widened().size


def test_an_act_order_is_kept_as_an_order_of_columns(written: Written) -> None:
    stored = HFCheckpoint(written("GPTQ, act-order")[0]).stored(Q_PROJ)
    assert isinstance(stored, GroupedTensor)
    assert stored.order is not None
    assert sorted(stored.order) == list(range(stored.order.size))


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for tests that each write the `quantization_config` that is refused."""
    path = tmp_path_factory.mktemp("refused")
    write_integers(path, LAYOUTS["GPTQ"])
    return path


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head True"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        (compressed("pack-quantized", 2, "group"), "num_bits 2"),
        (compressed("pack-quantized", 4, "block"), "strategy 'block'"),
        (compressed("int-quantized", 4, "channel"), "num_bits 4"),
        (compressed("int-quantized", 8, "group", inputs=PER_TOKEN), "strategy 'group'"),
        (compressed("int-quantized", 8, "channel", inputs={**PER_TOKEN, "dynamic": False}), "dynamic False"),
        (compressed("marlin-24", 4, "group"), "'marlin-24'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(quantization: dict[str, Any], reason: str, refused: Path) -> None:
    edit_config(refused, quantization_config=quantization)
    with pytest.raises(ModelUnsupported, match=f"not supported: .*{reason}"):
        HFCheckpoint(refused)


def test_groups_of_different_sizes_are_refused(tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS["GPTQ"])
    tensors = load_file(weights_file(tmp_path))
    tensors[Q_PROJ.replace("weight", "g_idx")][0] = 1
    save_file(tensors, weights_file(tmp_path))
    with pytest.raises(ModelUnsupported, match="g_idx with groups of different sizes"):
        HFCheckpoint(tmp_path).stored(Q_PROJ)
