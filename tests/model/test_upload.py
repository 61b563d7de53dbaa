"""Copies by way of pinned buffers equal their sources, whatever their size and type, on every device there is."""

from __future__ import annotations

import pytest
import torch

from penstock.model import upload
from penstock.model.upload import Upload
from tests.devices import NEEDS_GPU


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_copies_equal_their_sources(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_BUFFER_BYTES", 3 << 20)
    move = Upload()
    sources = [
        torch.randn(1000, 3000),
        torch.randn(3, 7).to(torch.bfloat16),
        torch.randint(0, 255, (4_000_001,), dtype=torch.uint8),
        torch.randn(3000, 1000)[:, 300:900],
        torch.randn(2048, 1024).to(torch.float8_e4m3fn),
        torch.tensor(3.0),
    ]
    copies = [move(source, torch.device(device)) for source in sources]
    for source, copy in zip(sources, copies, strict=True):
        assert (copy.device.type, copy.dtype) == (device, source.dtype)
        assert copy.data_ptr() != source.data_ptr()
        assert torch.equal(_bytes(copy.cpu()), _bytes(source))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
