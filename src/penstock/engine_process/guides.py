"""Parts of an engine for guided answers. A vocabulary takes half a second to make, in the first guided request."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.core.model_config import ModelConfig
from penstock.core.tokenizer_source import TokenizerFiles, TokenizerMetadata
from penstock.engine.ports import Guides


def make_guides(config: ModelConfig, source: TokenizerFiles | TokenizerMetadata) -> Guides | None:
    """None: without the library, or without a token that ends a text, there are none."""
    if find_spec("llguidance") is None or not config.eos_token_ids:
        return None
    from penstock.engine import guides
    from penstock.text.grammars import Vocabulary, Words
    from penstock.text.tokenizer import Tokenizer

    def words() -> Words:
        return Words.of(Tokenizer.load(source), config.vocab_size, config.eos_token_ids)

    return guides.Guides(Vocabulary.later(words, config.vocab_size, config.eos_token_ids))
