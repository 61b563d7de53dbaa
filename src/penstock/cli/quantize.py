"""`penstock quantize MODEL OUT --method gptq`: a model made small, and a report of what that saves and costs."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.core.errors import ConfigError, ModelUnsupported
from penstock.core.files import check_outputs, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.hub.checkpoint import Checkpoint
    from penstock.quant.recipe import Recipe
    from penstock.quant.report import Report
    from penstock.text.tokenizer import Tokenizer

METHODS = ("gptq", "awq", "int8", "fp8")
SAMPLES, SEQ_LEN = 64, 512
VERSION = 2  # of what a run writes: one by another version does not go on with it


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="an alias, a .gguf file, a Hugging Face directory, or hf:org/name"
    )
    parser.add_argument(
        "directory", type=Path, metavar="OUT", help="where to write; a run that was killed goes on there"
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="gptq",
        help="gptq and awq: 4 bits in groups, fitted to a text; int8: 8 bits and activations in 8 bits (W8A8), or with "
        "--group weights alone; fp8: E4M3, activations too (default: gptq)",
    )
    parser.add_argument("--bits", type=int, metavar="N", help="4, or 8 for gptq (default: 4; int8 and fp8: 8)")
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="columns with one scale (default: 128, or the largest half of it that divides the model's columns)",
    )
    symmetry = parser.add_mutually_exclusive_group()
    symmetry.add_argument(
        "--sym", dest="symmetric", action="store_true", default=None, help="no zero points (default, but for awq)"
    )
    symmetry.add_argument(
        "--asym", dest="symmetric", action="store_false", default=None, help="a zero point for each group"
    )
    parser.add_argument(
        "--act-order", action="store_true", help="gptq: group columns by importance; serving it costs a gather"
    )
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text to fit to (default: Alice's Adventures in Wonderland)"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"windows of that text (default: {SAMPLES}, or all there are)"
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="N", help=f"tokens of a window (default: {SEQ_LEN}, or the model's context)"
    )
    parser.add_argument(
        "--evaluation", type=Path, metavar="FILE", help="text to judge by (default: As You Like It, two acts)"
    )
    parser.add_argument("--eval-windows", type=int, default=16, metavar="N", help="windows of that text (default: 16)")
    parser.add_argument(
        "--report", choices=["full", "size"], default="full", help="size: without quality and speed (default: full)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report, for programs")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute (default: auto)"
    )


def run(arguments: argparse.Namespace) -> None:
    from penstock.hub.resolve import resolve
    from penstock.quant.recipe import make_recipe
    from penstock.quant.report import describe
    from penstock.terminal.progress import ProgressBar
    from penstock.text.tokenizer import Tokenizer

    checkpoint = resolve(arguments.model, progress=ProgressBar())
    _check_source(checkpoint)
    recipe = make_recipe(
        checkpoint.config,
        arguments.method,
        bits=arguments.bits,
        group=arguments.group,
        symmetric=arguments.symmetric,
        act_order=arguments.act_order,
    )
    print(describe(recipe, checkpoint.config), flush=True)
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    texts = _read_texts(arguments, recipe, tokenizer, checkpoint.config.context_length)
    # Quantizing; with a text to judge by, perplexity and speed before and after, and the perplexity of plain rounding.
    steps = Steps(1 if texts.evaluation is None else 6 if recipe.needs_data else 5)
    _write(arguments, checkpoint, recipe, tokenizer, texts, steps)
    report = _report(arguments, checkpoint, recipe, texts.evaluation, steps)
    print(report.text())
    if arguments.json:
        write_json(arguments.json, report)


def _report(
    arguments: argparse.Namespace, checkpoint: Checkpoint, recipe: Recipe, evaluation: Tensor | None, steps: Steps
) -> Report:
    """The report on the directory that was written; without a text to judge by, on its size alone."""
    from penstock.cli.quantize_speed import speeds_of
    from penstock.hub.hf import HFCheckpoint
    from penstock.quant.report import Report, Speeds, qualities_of, sizes_of, starved_of

    made = HFCheckpoint(arguments.directory)
    quality = speed = None
    if evaluation is not None:
        name, device = str(arguments.evaluation or "As You Like It"), choose_device(arguments.device)
        quality = qualities_of(checkpoint, made, recipe, evaluation, name, device, steps.begin)
        speed = Speeds(
            speeds_of(checkpoint, steps.begin("speed before", "rounds")),
            speeds_of(made, steps.begin("speed after", "rounds")),
        )
    return Report(
        model=arguments.model,
        directory=str(arguments.directory),
        recipe=recipe,
        sizes=sizes_of(checkpoint, made),
        starved=starved_of(checkpoint.config, recipe, arguments.directory),
        quality=quality,
        speed=speed,
    )


def _write(
    arguments: argparse.Namespace,
    checkpoint: Checkpoint,
    recipe: Recipe,
    tokenizer: Tokenizer,
    texts: Texts,
    steps: Steps,
) -> None:
    from penstock.hub.quantized_directory import QuantizedDirectory
    from penstock.quant.job import quantize

    making = _making(arguments.model, checkpoint, recipe, texts.calibration)
    device, bar = choose_device(arguments.device), steps.begin(recipe.method)
    with QuantizedDirectory.opened(
        arguments.directory,
        making,
        checkpoint.config.num_layers,
        on_wait=lambda: print("another process is writing there; waiting for it", flush=True),
    ) as directory:
        if directory.is_complete:
            print(f"{directory.path} is there already, made with the same arguments")
            return
        quantize(checkpoint, recipe, directory, texts.calibration, device, bar)
        directory.finish(
            checkpoint,
            recipe.config(checkpoint.config),
            recipe.dtype,
            tokenizer_json=tokenizer.to_json(),
            special_tokens=tokenizer.special_tokens(),
        )


def _check_source(checkpoint: Checkpoint) -> None:
    """A GGUF may be quantized again, from what its numbers stand for: models are had that are nothing else."""
    from penstock.hub.gguf import GGUFCheckpoint
    from penstock.quant.walk import check_family

    check_family(checkpoint.config)
    if checkpoint.config.quantization is not None and not isinstance(checkpoint, GGUFCheckpoint):
        raise ModelUnsupported(
            f"{checkpoint.path} is quantized already ({checkpoint.config.quantization}); "
            "quantize the model that it was made of"
        )


def _making(model: str, checkpoint: Checkpoint, recipe: Recipe, token_ids: Tensor | None) -> dict[str, Any]:
    """All that what is written depends on."""
    from penstock.hub.quantized_directory import fingerprint

    making = {"version": VERSION, "model": model, "files": fingerprint(checkpoint.path), **msgspec.to_builtins(recipe)}
    if token_ids is None:
        return making
    samples, seq_len = token_ids.shape
    digest = hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()
    return {**making, "samples": samples, "seq_len": seq_len, "tokens_sha256": digest}


@dataclass(frozen=True)
class Texts:
    """Texts as windows of tokens: what to fit to and what to judge by, where they are wanted."""

    calibration: Tensor | None
    evaluation: Tensor | None


def _read_texts(arguments: argparse.Namespace, recipe: Recipe, tokenizer: Tokenizer, context: int) -> Texts:
    """All that may be wrong with them is found before anything takes long."""
    from penstock.quant.data import windows

    check_outputs(arguments.json)
    for name in ("samples", "seq_len", "eval_windows"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more", param=name)
    seq_len = arguments.seq_len or min(SEQ_LEN, context)
    if seq_len > context:
        raise ConfigError(f"seq_len is {seq_len}, but the model's context ends at {context}", param="seq_len")
    if arguments.calibration and not recipe.needs_data:
        raise ConfigError(f"{recipe.method} is fitted to no text; leave out --calibration", param="calibration")
    calibration = _read_text(arguments.calibration, "calibration") if recipe.needs_data else None
    evaluation = _read_text(arguments.evaluation, "evaluation") if arguments.report == "full" else None
    if calibration is not None and calibration == evaluation:
        raise ConfigError("calibration and evaluation are the same text; judge by another than the one fitted to")
    length = min(SEQ_LEN, context)
    return Texts(
        None if calibration is None else windows(calibration, tokenizer, seq_len, SAMPLES, arguments.samples),
        None if evaluation is None else windows(evaluation, tokenizer, length, arguments.eval_windows),
    )


def _read_text(path: Path | None, default: Literal["calibration", "evaluation"]) -> str:
    from penstock.quant.texts import text

    if path is None:
        return text(default)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as text: {error}") from None


def choose_device(wanted: str) -> Any:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no GPU here", param="device")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


class Steps:
    """The steps of a run, each with a bar: which of how many it is, how far, and how long it will take."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0

    def begin(self, what: str, unit: str = "layers") -> Callable[[int, int], None]:
        from penstock.terminal.progress import ProgressBar

        self._number += 1
        bar, label = ProgressBar(unit=unit), f"step {self._number} of {self._total}: {what}"
        return lambda done, total: bar(label, done, total)
