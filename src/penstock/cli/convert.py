"""`penstock convert MODEL DIR`: a model as the Hugging Face directory that other servers read."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="an alias, a .gguf file, a Hugging Face directory, or hf:org/name"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write")
    parser.add_argument("--to", choices=["hf"], default="hf", help="the format: a Hugging Face directory")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")


def run(arguments: argparse.Namespace) -> None:
    from penstock.hub.convert import convert_to_hf
    from penstock.hub.resolve import resolve
    from penstock.terminal.progress import ProgressBar
    from penstock.text.tokenizer import Tokenizer

    directory, dtype = arguments.directory, arguments.dtype
    checkpoint = resolve(arguments.model, progress=ProgressBar())
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    special_tokens = tokenizer.special_tokens()
    convert_to_hf(
        checkpoint,
        directory,
        tokenizer_json=tokenizer.to_json(),
        special_tokens=special_tokens,
        dtype=dtype,
        progress=ProgressBar(unit="tensors"),
    )
    print(f"wrote {directory}: config, {dtype} weights, tokenizer and chat template")
