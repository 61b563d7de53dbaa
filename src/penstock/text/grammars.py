"""Guides made to work: which tokens may come next. The only module that knows llguidance.

A `Matcher` follows one answer. It never raises for what a grammar does: it stops, and says why. Making one may take a
while and masks take from microseconds to milliseconds, so both let go of the interpreter lock. `prepare` makes the
first one of a guide, in the same way where a guide is tried and where it is used: what passes the one passes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import is_lark_syntax

from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.core.guide import Guide
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Bits = np.ndarray[tuple[int], np.dtype[np.uint8]]

_NUM_TRIED = 4  # tokens, or runs of forced ones
_MAX_ERROR = 300  # characters of what the library says
_MARK = "\x02"  # before a text that is to be encoded as one that goes on; no vocabulary joins it with anything


# One way to write JSON, as Python's `json.dumps` does, so that all between the values is forced. A schema may ask for
# another in its `x-guidance`.
_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Not for it to choose: an unknown keyword is an error, and what two schemas of a oneOf allow would not be valid.
_STRICT: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}


class Words:
    """A vocabulary as bytes, in the form in which llguidance asks for it."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.eos_ids = list(eos_ids)
        self.tokenizer: Tokenizer | None = None  # None: nobody asks for forced tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Words:
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        words = cls(tokens, sorted(i for i in tokenizer.special_ids if i < vocab_size), eos_ids)
        words.tokenizer = tokenizer
        return words

    def __call__(self, text: bytes) -> list[int]:
        """Ids of the text as the tokenizer writes it in the middle of a text."""
        if self.tokenizer is None:
            return []
        token_ids = self.tokenizer.encode(_MARK + text.decode(), add_special_tokens=False)
        skipped = b""
        for at, token_id in enumerate(token_ids):
            if skipped.endswith(_MARK.encode()):
                return token_ids[at:]
            skipped += self.tokens[token_id]
        return []


class Vocabulary:
    """Vocabulary that the matchers of one model share. The first of them has its tokenizer made, which takes a good
    part of a second and holds the interpreter lock."""

    def __init__(self, words: Words) -> None:
        self._set(lambda: words, len(words.tokens), words.eos_ids)

    @classmethod
    def later(cls, words: Callable[[], Words], size: int, eos_ids: Sequence[int]) -> Vocabulary:
        """One whose words are made when they are needed, in the thread that needs them."""
        vocabulary = cls.__new__(cls)
        vocabulary._set(words, size, eos_ids)
        return vocabulary

    def _set(self, words: Callable[[], Words], size: int, eos_ids: Sequence[int]) -> None:
        self._words = words
        self.size = size
        self.mask_bytes = -(-size // 8)
        self.eos_ids = list(eos_ids)
        self.limits = llguidance.LLParserLimits(max_lexer_states=50_000, step_max_items=20_000, verbose_errors=False)

    @cached_property
    def words(self) -> Words:
        return self._words()

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        words = llguidance.TokenizerWrapper(self.words)
        return llguidance.LLTokenizer(words, n_vocab=self.size, eos_token=self.eos_ids)


class Matcher:
    def __init__(self, vocabulary: Vocabulary, guide: Guide) -> None:
        """Raises an InvalidRequest for a guide that cannot be followed."""
        self._vocabulary = vocabulary
        try:
            grammar = _grammar(guide)
        except ValueError as error:  # JSON that is none
            raise InvalidRequest(_clip(str(error))) from None
        self._matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=vocabulary.limits)
        if self.error:
            raise UnsupportedParameter(self.error)

    def copy(self) -> Matcher:
        other = object.__new__(Matcher)
        other._vocabulary = self._vocabulary
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def error(self) -> str:
        return _clip(self._matcher.get_error())

    @property
    def is_over(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped()

    def take(self, token_ids: list[int]) -> bool:
        """False: they do not follow the guide, and there is an error now."""
        return self._matcher.consume_tokens(token_ids)

    def forced(self) -> list[int]:
        """Tokens that have to come next, whatever the model thinks."""
        return self._matcher.compute_ff_tokens()

    def mask(self, barred_ids: Sequence[int] = ()) -> bytes:
        """Mask of the tokens that may come next: one bit each, the lowest id first. Never empty: what is stuck ends.

        `barred_ids` are left out, unless there is nothing else.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._vocabulary.mask_bytes].copy()
        if barred_ids:
            allowed = _without(bits, barred_ids)
            bits = allowed if allowed.any() else bits
        if not bits.any():
            for token_id in self._vocabulary.eos_ids:
                bits[token_id >> 3] |= 1 << (token_id & 7)
        return bits.tobytes()


def prepare(vocabulary: Vocabulary, guide: Guide) -> Matcher:
    """A matcher that has made its first mask, which is the slowest, and from which others are copied.

    Raises an InvalidRequest for a guide that no answer can follow: all that a sequence does before its first token is
    done here once.
    """
    matcher = Matcher(vocabulary, guide)
    first = matcher.mask()
    _check(matcher)
    if not _without(first, vocabulary.eos_ids).any():
        raise UnsupportedParameter("no answer can follow it but an empty one")
    copy = matcher.copy()
    copy.forced()  # it has limits of its own
    _check(copy)
    copy.mask()
    _check(copy)
    return matcher


def try_out(vocabulary: Vocabulary, guide: Guide) -> None:
    """A trial does what the engine does until an answer has a few tokens. Raises an InvalidRequest like `prepare`."""
    matcher = prepare(vocabulary, guide).copy()
    for _ in range(_NUM_TRIED):
        if matcher.is_over:
            return
        forced = matcher.forced()
        _check(matcher)
        choices = _without(matcher.mask(), vocabulary.eos_ids)
        _check(matcher)
        if not choices.any():
            return
        matcher.take(forced or np.flatnonzero(np.unpackbits(choices, bitorder="little"))[:1].tolist())
        _check(matcher)


def _check(matcher: Matcher) -> None:
    if matcher.error:
        raise UnsupportedParameter(f"no answer can follow it ({matcher.error})")


def as_lark(guide: Guide) -> Guide:
    """A grammar that is written as GBNF or EBNF, in Lark's language; any other guide as it is."""
    if guide.kind != "grammar" or is_lark_syntax(guide.source):
        return guide
    try:
        return Guide("grammar", llguidance.gbnf_to_lark.gbnf_to_lark(guide.source))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(_clip(f"this is not a grammar: {error}")) from None


def _grammar(guide: Guide) -> str:
    match guide.kind:
        case "json_schema":
            # Options are written into the schema, so it has to be an object.
            schema = "{}" if guide.source.strip() == "true" else guide.source
            return llguidance.LLMatcher.grammar_from_json_schema(schema, _STYLE, _STRICT)
        case "regex":
            if (len(guide.source) - len(guide.source.rstrip("\\"))) % 2:  # the library would leave it out
                raise ValueError("regex parse error: it ends in a backslash that escapes nothing")
            return llguidance.LLMatcher.grammar_from_regex(guide.source)
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(guide.source)


def _without(mask: bytes | Bits, token_ids: Sequence[int]) -> Bits:
    """A copy."""
    bits = np.frombuffer(mask, np.uint8).copy()
    for token_id in token_ids:
        bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
    return bits


def _clip(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR else f"{line[:_MAX_ERROR]}…"
