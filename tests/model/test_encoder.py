"""An encoder computes each text by itself, whatever lies beside it and wherever it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.model import encoder
from penstock.model.texts import Texts
from tests.devices import NEEDS_GPU
from tests.model.random_encoder import random_encoder

TEXTS = [np.random.default_rng(3).integers(0, 200, n).tolist() for n in (5, 1, 40, 64, 33, 5, 90, 2, 31)]
CPU = torch.device("cpu")
on_gpu = pytest.param("cuda", torch.float32, 1e-4, marks=NEEDS_GPU)
on_gpu_in_16_bits = pytest.param("cuda", torch.bfloat16, 0.2, marks=NEEDS_GPU)


def states(device: str, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    own = random_encoder(2, 128, device, dtype, head_dim=32, vocab=200, context=100)
    with torch.inference_mode():
        return own(Texts.of(texts, torch.device(device))).float().cpu()


@pytest.mark.parametrize(("device", "dtype", "tolerance"), [("cpu", torch.float32, 1e-5), on_gpu, on_gpu_in_16_bits])
def test_texts_do_not_see_each_other(
    device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = torch.cat([states("cpu", torch.float32, [text]) for text in TEXTS])
    monkeypatch.setitem(encoder._GROUP_STEP, device, 32)  # as on a GPU: texts of about one length go together
    assert (states(device, dtype, TEXTS) - alone).abs().max() < tolerance


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pieces_are_pooled_as_a_whole(pooling: str) -> None:
    texts = Texts.of(TEXTS, CPU)
    found = torch.randn(sum(texts.lengths), 16, generator=torch.Generator().manual_seed(1))
    whole = texts.pooled([found], pooling)  # type: ignore[arg-type]
    torch.testing.assert_close(texts.pooled(found.split(37), pooling), whole)  # type: ignore[arg-type]
    rows = dict(zip(range(len(TEXTS)), found.split(texts.lengths), strict=True))
    for text, states in rows.items():
        own = {"mean": states.mean(dim=0), "first": states[0], "last": states[-1]}[pooling]
        torch.testing.assert_close(whole[text], torch.nn.functional.normalize(own, dim=0))
