from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.core.errors import ModelCorrupt
from penstock.hub.safetensors_file import DType, SafetensorsFile, write_safetensors

_MAX_HEADER_BYTES = 100_000_000  # the library's limit
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


def entry(**changed: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changed}}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"nothing",
        b"[]",
        b"[" * 100_000,
        b'{"w":' * 100_000,
        b'{"w": 3}',
        b'{"\xff": 3}',
        {"w": {}},
        {"__metadata__": 3},
        entry(shape=[-1]),
        entry(shape=[2**70]),
        entry(shape=["1"]),
        entry(shape=[1] * 100),
        entry(shape=7),
        entry(dtype=["F32"]),
        entry(data_offsets=[4, 0]),
        entry(data_offsets=[-4, 0]),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, 2**80]),
        entry(data_offsets=[0, 400]),
        entry(data_offsets=[1, 5]),
        entry(shape=[2]),
        entry(dtype="F33"),
        entry() | {"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        entry() | {"v": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}},
    ],
)
def test_a_damaged_header_is_told(header: bytes | dict[str, object], tmp_path: Path) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    with pytest.raises(ModelCorrupt, match="download it again"):
        SafetensorsFile(path)


def test_a_header_may_be_long_but_not_without_end(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((_MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(_MAX_HEADER_BYTES + 100)
    with pytest.raises(ModelCorrupt, match="header too large"):
        SafetensorsFile(path)


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "model.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        write_safetensors(path, [("a", np.zeros(100_000, np.float32))], 1, "float32")
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []
