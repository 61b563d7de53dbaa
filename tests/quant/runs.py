"""Tiny models and the directories that quantizing makes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from penstock.hub.hf import HFCheckpoint
from penstock.hub.quantized_directory import QuantizedDirectory
from penstock.quant.job import quantize
from penstock.quant.quality import walked
from penstock.quant.recipe import MethodName, Recipe, make_recipe
from penstock.quant.walk import Walk
from tests.hub.families import FAMILIES, random_model
from tests.hub.more_families import MORE

CPU = torch.device("cpu")


def saved(config: PreTrainedConfig, path: Path) -> HFCheckpoint:
    random_model(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return HFCheckpoint(path)


def tokens(*, seed: int = 0) -> Tensor:
    return torch.randint(0, 96, (8, 64), generator=torch.Generator().manual_seed(seed))


class Killed(Exception):
    pass


def run(checkpoint: HFCheckpoint, recipe: Recipe, out: Path, *, killed_at: int | None = None) -> HFCheckpoint:
    def progress(done: int, total: int) -> None:
        if done == killed_at:
            raise Killed

    with QuantizedDirectory.opened(out, {"recipe": str(recipe)}, checkpoint.config.num_layers) as directory:
        quantize(checkpoint, recipe, directory, tokens(), CPU, progress)
        directory.finish(checkpoint, recipe.config(checkpoint.config), recipe.dtype, "{}", {})
    return HFCheckpoint(out)


def walk(checkpoint: HFCheckpoint) -> Walk:
    """The model's way through a text that it was not fitted to."""
    return walked(checkpoint, tokens(seed=1), CPU, lambda *_: None)


class Runs:
    """Models of every family and what each method made of them, each made once: many tests look at the same ones, and
    none writes to them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.original = cache(self._original)
        self.made = cache(self._made)
        self.before = cache(lambda family: walk(self.original(family)))

    def _original(self, family: str) -> HFCheckpoint:
        return saved((FAMILIES | MORE)[family], self._directory / family)

    def _made(self, family: str, method: MethodName) -> HFCheckpoint:
        original = self.original(family)
        return run(original, make_recipe(original.config, method), self._directory / f"{family} {method}")
