"""Small tokenizers of the two kinds, trained on the spot and described as a GGUF file would describe them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, and we'll see what they've done!",
    "def main(argv: list[str]) -> int:\n    for i in range(100):\n        print(f'{i}: {argv[i]}')\n    return 0\n",
    "Größe, naïve café, über 30 Maße; Привет, как дела? 日本語のテキスト 中文 العربية 🙂🙃",
    "    indented\n\n\ttabs and   spaces   \r\n and the words that come after the spaces",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def load(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(TokenizerMetadata(metadata, None))


def byte_level(pre: str = "smollm", special: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """`special`: tokens that are skipped when an answer is read, behind all others."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokens, merges = _train(tokenizer, trainer)
    types = [3] * 3 + [1] * (len(tokens) - 3)
    tokens, types = [*tokens, "<think>", *special], [*types, 4, *[3] * len(special)]
    return _metadata("gpt2", tokens, types, pre=pre, merges=[" ".join(merge) for merge in merges], **more)


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, limit_alphabet=70, show_progress=False)
    trained, _ = _train(tokenizer, trainer)
    pieces = [*trained[3:], "▁▁", "▁▁▁", "▁▁▁▁"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return _metadata("llama", tokens, types, pre="default", scores=scores, **more)


def _train(tokenizer: tokenizers.Tokenizer, trainer: Any) -> tuple[list[str], list[list[str]]]:
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"]


def _metadata(model: str, tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    keys = {"model": model, "tokens": tokens, "token_type": types, **more}
    keys |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
