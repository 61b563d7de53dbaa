"""Tokens that come several at a time read, and count, like those that come one by one."""

from __future__ import annotations

from functools import cache

import hypothesis.strategies as st
from hypothesis import given

from penstock.core.request import FinishReason, TokenEvent, TokenLogprobs
from penstock.server.choices import ChoiceText
from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopStrings
from penstock.text.tokenizer import Tokenizer
from tests.text import small

Read = tuple[str, int, list[int], FinishReason | None, str | None, int]


@cache
def tokenizer() -> Tokenizer:
    return small.load(small.byte_level())


def read(groups: list[list[int]], stops: tuple[str, ...]) -> Read:
    """Text, tokens counted, the tokens, how it ended and by what, and how many scores there were."""
    choice = ChoiceText(0, Detokenizer(tokenizer()), tokenizer(), StopStrings(stops))
    text, num_scores = "", 0
    token_ids: list[int] = []
    for number, group in enumerate(groups, 1):
        finish = FinishReason.LENGTH if number == len(groups) else None
        piece = choice.read_event(TokenEvent("a", group, finish, [TokenLogprobs(-1.0) for _ in group]))
        text += piece.text
        token_ids += piece.token_ids
        num_scores += len(piece.logprobs or ())
        if piece.finish is not None:
            return text, choice.num_tokens, token_ids, piece.finish, piece.stop, num_scores
    return text, choice.num_tokens, token_ids, None, None, num_scores


@given(
    text=st.text(alphabet="ab \n", min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    stops=st.sampled_from([(), ("b",), ("a b", "bb"), ("\n",)]),
)
def test_how_tokens_are_grouped_makes_no_difference(text: str, sizes: list[int], stops: tuple[str, ...]) -> None:
    token_ids = tokenizer().encode(text, add_special_tokens=False)
    groups, left = [], list(token_ids)
    for size in sizes:
        if left:
            groups.append(left[:size])
            left = left[size:]
    assert read(groups, stops) == read([[token_id] for token_id in token_ids], stops)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    token_ids = tokenizer().encode("a b a b", add_special_tokens=False)
    whole = read([token_ids], ("b",))
    assert whole[0] == "a "
    assert whole[1] < len(token_ids)
    assert whole[3] is FinishReason.STOP
