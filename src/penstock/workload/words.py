"""Texts of so many tokens, made of words that are one token each. It knows no server; who counts is passed in.

What a server adds to the words (a chat's template, a first token) and what a word costs where no tokenizer is at
hand is measured by counting two texts: `Scale`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from penstock.text.tokenizer import Tokenizer

WORD = re.compile(r" [a-z]{3,9}")
SHORT, LONG = 64, 320  # words of the two texts that are counted

# For a server whose tokenizer nobody has: words so common that most vocabularies have each as a token.
_COMMON = """
the of and to in that for was with his have from they she which were her all one there been their would
when what more some time could two than other then them only like into these also did many out over such
years first after new made most people may good way even know where back between life much before how long
right through just work well year last little world still own under never same another while house great
might part however against down place small found day state man because thought went say without does left
number course war until always away something fact though water less public put think almost hand enough
took head yet government system set told better nothing night end why called didn find going look asked
later knew point next program city business give group toward days young let room president side social
given several order national possible rather second face per among form important often things looked early
white case john large big need four within felt along children saw best church ever power least development
light thing seemed family interest want members mind country area others done turned although open god
"""
COMMON = [f" {word}" for word in _COMMON.split()]


@dataclass(frozen=True)
class Scale:
    """The scale from words to the tokens that the server counts."""

    tokens_per_word: float = 1.0
    overhead: int = 0  # tokens that are no words: a template's, a first one

    @classmethod
    def of(cls, short_tokens: int, long_tokens: int) -> Scale:
        """Returns the scale of a server that counted the texts of SHORT and LONG words as so many tokens."""
        per_word = max(0.1, (long_tokens - short_tokens) / (LONG - SHORT))
        return cls(per_word, max(0, round(short_tokens - SHORT * per_word)))

    def words(self, num_tokens: int) -> int:
        """Returns how many words make a prompt of that many tokens; at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def text(words: Sequence[str], num_words: int, source: Random) -> str:
    return "".join(source.choices(words, k=num_words))


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words, each with its leading space."""
    texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
    words = [text for text in texts if WORD.fullmatch(text)]
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    return [word for word, ids in zip(words, encoded, strict=True) if len(ids) == 1]
