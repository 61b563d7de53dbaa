"""What an engine needs for guided answers, made while the weights are read: it takes a good part of a second."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec

from penstock.core.errors import PenstockError
from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.engine.ports import Guides

log = logging.getLogger("penstock.engine")


def making_guides(config: ModelConfig, source: TokenizerFiles | TokenizerMetadata) -> Future[Guides | None]:
    """None: without the library, or without words, there are none."""
    pool = ThreadPoolExecutor(1, "vocabulary")
    try:
        return pool.submit(_make, config, source)
    finally:
        pool.shutdown(wait=False)


def _make(config: ModelConfig, source: TokenizerFiles | TokenizerMetadata) -> Guides | None:
    if find_spec("llguidance") is None or not config.eos_token_ids:
        return None
    from penstock.engine import guides
    from penstock.text.grammars import Vocabulary, Words
    from penstock.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(source)
    except PenstockError as error:
        log.warning("no guided answers: %s", error.message)
        return None
    return guides.Guides(Vocabulary(Words.of(tokenizer, config.vocab_size, config.eos_token_ids)))
