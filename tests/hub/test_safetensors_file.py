from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.hub.safetensors_file import DType, SafetensorsFile, write_safetensors

DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_what_is_written(dtype: DType, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {f"model.layers.{i}.weight": random.normal(size=(3, 5 + i)).astype(np.float32) for i in range(40)}
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors.items(), len(tensors), dtype)
    theirs = load_file(path)
    ours = SafetensorsFile(path)
    assert theirs.keys() == ours.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        expected = torch.from_numpy(values).to(DTYPES[dtype])
        assert torch.equal(theirs[name], expected)
        np.testing.assert_array_equal(ours.stored(name).widened(), expected.float().numpy())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
