"""Report of what `penstock quantize` saved and cost: sizes, perplexities, tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.quantized_directory import QuantizedDirectory, fingerprint, tensor_bytes
from penstock.model.weights import read_stored
from penstock.quant.job import Progress
from penstock.quant.layerwise import rounded
from penstock.quant.quality import Quality, judged, walked
from penstock.quant.recipe import GROUP, Recipe, columns

MAX_NAMED = 4  # experts, in a line


@dataclass(frozen=True)
class Sizes:
    files_before: int
    files_after: int
    linears_in_16_bits: int
    linears_in_files: int
    linears_in_memory: int

    @property
    def saved(self) -> float:
        """Share of the linears' memory saved, against 16 bits."""
        return 1 - self.linears_in_memory / self.linears_in_16_bits


@dataclass(frozen=True)
class Qualities:
    text: str
    tokens: int
    before: Quality
    nearest: Quality | None  # rounded to the nearest in the same format; None: that is the method
    after: Quality


@dataclass(frozen=True)
class Speeds:
    """Output tokens per second, by the number of requests at once."""

    before: dict[int, float]
    after: dict[int, float]


@dataclass(frozen=True)
class Starved:
    """Experts that no data was fitted to, since too few rows of it reached them."""

    experts: list[str]
    of: int  # experts in all

    def text(self) -> str:
        shown = ", ".join(self.experts[:MAX_NAMED]) + (", …" if len(self.experts) > MAX_NAMED else "")
        return (
            f"{len(self.experts)} of {self.of} experts saw too little of the text and were rounded to the nearest "
            f"({shown}); more --samples, or a --calibration like what the model will read, reaches them"
        )


@dataclass(frozen=True)
class Report:
    model: str
    directory: str
    recipe: Recipe
    sizes: Sizes
    starved: Starved | None  # None: the model has no experts, or the method needs no data
    quality: Qualities | None
    speed: Speeds | None

    def text(self) -> str:
        sizes = self.sizes
        lines = [
            f"wrote {self.directory}",
            f"files          {_mb(sizes.files_before)} -> {_mb(sizes.files_after)}",
            f"linear weights {_mb(sizes.linears_in_16_bits)} in 16 bits -> {_mb(sizes.linears_in_memory)} in memory, "
            f"{_mb(sizes.linears_in_files)} in files: {sizes.saved:.1%} less memory",
        ]
        if self.starved and self.starved.experts:
            lines.append(self.starved.text())
        if self.quality:
            lines += _quality_lines(self.quality)
        if self.speed:
            lines += [
                f"tokens/s, {count} at once: {self.speed.before[count]:,.1f} -> {self.speed.after[count]:,.1f}"
                for count in self.speed.before
            ]
        return "\n".join([*lines, f"serve it: penstock serve {self.directory}"])


def describe(recipe: Recipe, config: ModelConfig) -> str:
    scales = "a scale per output, activations too" if recipe.group is None else f"groups of {recipe.group}"
    kind = "" if recipe.group is None else ", symmetric" if recipe.symmetric else ", with zero points"
    order = ", by act-order" if recipe.act_order else ""
    line = f"{recipe.method}: {recipe.bits} bits, {scales}{kind}{order}"
    if recipe.group is not None and recipe.group < GROUP:
        line += f" (the largest up to {GROUP} that divides {', '.join(map(str, sorted(columns(config))))} columns)"
    return line


def starved_of(config: ModelConfig, recipe: Recipe, directory: Path) -> Starved | None:
    if config.experts is None or not recipe.needs_data:
        return None
    num_layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    found = QuantizedDirectory(directory, config.num_layers).starved()
    return Starved(found, num_layers * config.experts.count)


def sizes_of(checkpoint: Checkpoint, made: HFCheckpoint) -> Sizes:
    """Linears are those that were quantized: all but routers and the head."""
    cpu = torch.device("cpu")
    read = {name: read_stored(made, name, cpu) for name in made.tensor_names() if name.startswith("model.layers.")}
    weights = {name: weight for name, weight in read.items() if not isinstance(weight, Tensor)}
    bases = tuple(name.removesuffix("weight") for name in weights)
    return Sizes(
        files_before=sum(fingerprint(checkpoint.path).values()),
        files_after=sum(fingerprint(made.path).values()),
        linears_in_16_bits=2 * sum(weight.shape.numel() for weight in weights.values()),
        linears_in_files=sum(
            size for name, size in tensor_bytes(made.path) if name.startswith(bases) and not name.endswith(".bias")
        ),
        linears_in_memory=sum(weight.num_bytes for weight in weights.values()),
    )


def qualities_of(
    checkpoint: Checkpoint,
    made: Checkpoint,
    recipe: Recipe,
    token_ids: Tensor,
    text: str,
    device: torch.device,
    begin: Callable[[str], Progress],
) -> Qualities:
    """`begin` names the next step, and is told how far it is."""
    before = walked(checkpoint, token_ids, device, begin("perplexity before"))
    nearest = None
    if recipe.needs_data:
        change = partial(rounded, quantize=recipe.nearest)
        nearest = judged(walked(checkpoint, token_ids, device, begin("rounded to nearest"), change), before)
    after = judged(walked(made, token_ids, device, begin("perplexity after")), before)
    return Qualities(text, token_ids.numel(), judged(before), nearest, after)


def _quality_lines(quality: Qualities) -> list[str]:
    before = quality.before.perplexity

    def line(what: str, one: Quality) -> str:
        return (
            f"  {what:18} {one.perplexity:9.3f} ({one.perplexity / before - 1:+.2%}), divergence {one.divergence:.4f}"
        )

    lines = [f"perplexity on {quality.tokens:,} tokens of {quality.text}", f"  {'before':18} {before:9.3f}"]
    if quality.nearest:
        lines.append(line("rounded to nearest", quality.nearest))
    return [*lines, line("after", quality.after)]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
