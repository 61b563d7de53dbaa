"""`penstock convert MODEL DIR`: a model as the Hugging Face directory that other servers read."""

from __future__ import annotations

from pathlib import Path

from penstock.hub.convert import convert_to_hf
from penstock.hub.progress import ProgressBar
from penstock.hub.resolve import resolve
from penstock.hub.safetensors_file import DType
from penstock.text.tokenizer import Tokenizer


def convert(spec: str, directory: Path, dtype: DType) -> None:
    checkpoint = resolve(spec, progress=ProgressBar())
    tokenizer = Tokenizer.load(checkpoint.tokenizer_source)
    special_tokens = tokenizer.special_tokens()
    convert_to_hf(checkpoint, directory, tokenizer_json=tokenizer.to_json(), special_tokens=special_tokens, dtype=dtype)
    print(f"wrote {directory}: config, {dtype} weights, tokenizer and chat template")
