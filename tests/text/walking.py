"""Answers that follow a guide and are random in all else: what a model with no idea would say."""

from __future__ import annotations

import importlib
import json
import lzma
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.text.grammars import Matcher, Vocabulary, Words
from tests.text import small

EOS = 2


@cache
def tokenizer(special: tuple[str, ...] = ()) -> Any:
    return small.load(small.byte_level(special=special))


@cache
def vocabulary(special: tuple[str, ...] = ()) -> Vocabulary:
    known = tokenizer(special)
    return Vocabulary(Words.of(known, known.vocab_size, [EOS]))


def allowed(mask: bytes) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return found


class Walker:
    """It likes to close what is open, so that most walks come to an end."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._weights = np.array(
            [30.0 if set(tokenizer().token_bytes(i)) & set(b'"}]') else 1.0 for i in range(tokenizer().vocab_size)]
        )
        self._weights[EOS] = 50.0

    def walk(self, matcher: Matcher, most_tokens: int = 400) -> str | None:
        """The answer; None: it would have been longer."""
        taken: list[int] = []
        while len(taken) < most_tokens:
            if matcher.is_over:
                assert not matcher.error
                return str(tokenizer().decode(taken))
            choices = allowed(matcher.mask())
            weights = self._weights[choices]
            token_id = int(self._random.choice(choices, p=weights / weights.sum()))
            if token_id == EOS:
                return str(tokenizer().decode(taken))
            for token_ids in ([token_id], matcher.forced):
                new = token_ids if isinstance(token_ids, list) else token_ids() if not matcher.is_over else []
                assert not new or matcher.take(new), matcher.error
                taken += new
        return None


def sdk_schemas(root: str, every: int = 1) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields schemas of an SDK's thousands of types: what users who describe answers with pydantic send."""
    from pydantic import BaseModel

    package = importlib.import_module(root)
    count = 0
    for module in pkgutil.walk_packages(package.__path__, f"{root}."):
        for name, kind in vars(importlib.import_module(module.name)).items():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == module.name:
                count += 1
                if count % every == 0:
                    yield f"{module.name}.{name}", kind.model_json_schema(), ""


def suite_schemas() -> list[dict[str, Any]]:
    """Every schema of JSON-Schema-Test-Suite, with instances that are valid and some that are not."""
    packed = Path(__file__).parent / "data" / "json_schema_test_suite.json.xz"
    found: list[dict[str, Any]] = json.loads(lzma.decompress(packed.read_bytes()))
    return found
