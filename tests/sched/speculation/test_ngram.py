from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from penstock.core.images import image_tokens
from penstock.core.request import Request
from penstock.sched.sequence import Sequence
from penstock.sched.speculation.ngram import PairChains, PromptLookup


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence(Request("a", token_ids, 100), arrival_s=0.0, order=1, block_size=16)


def propose(token_ids: list[int], count: int) -> list[int] | None:
    lookup, sequence = PromptLookup(), sequence_of(token_ids)
    return None if lookup.look(sequence) is None else lookup.propose([(sequence, count)])[0]


def test_what_followed_the_last_time_is_proposed() -> None:
    assert propose([5, 6, 7, 8, 9, 1, 5, 6], 3) == [7, 8, 9]


def test_what_the_client_expects_is_proposed_once_the_answer_is_in_it() -> None:
    request = Request("a", [1, 2], 100, predicted_ids=[5, 6, 7, 8, 9])
    sequence = Sequence(request, arrival_s=0.0, order=1, block_size=16)
    lookup = PromptLookup()
    assert lookup.look(sequence) is None
    sequence.token_ids += [5, 6]
    assert lookup.look(sequence) is not None
    assert lookup.propose([(sequence, 3)]) == [[7, 8, 9]]


def test_without_a_pair_that_came_before_there_is_nothing() -> None:
    assert propose([], 3) is None
    assert propose([5], 3) is None
    assert propose([5, 6, 7, 8, 5, 7], 3) is None


def test_the_place_that_agrees_furthest_is_followed() -> None:
    assert propose([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1) == [50]


def test_of_places_that_agree_alike_the_latest_is_followed() -> None:
    assert propose([1, 2, 50, 3, 1, 2, 60, 4, 1, 2], 1) == [60]


def test_what_runs_into_the_end_goes_round() -> None:
    assert propose([4, 1, 2, 3, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert propose([8, 8, 8], 4) == [8, 8, 8, 8]


def test_tokens_of_images_are_never_proposed() -> None:
    (image,) = image_tokens("2a" * 16, 1)
    assert propose([5, 6, 7, image, image, 8, 5, 6], 5) == [7]
    assert propose([5, 6, image, image, 8, 5, 6], 5) == []


def test_a_longer_agreement_is_of_a_better_kind() -> None:
    lookup = PromptLookup()
    text = list(range(100, 120))
    kinds = [lookup.look(sequence_of([*text, 1, *text[:count]])) for count in (2, 3, 5, 7, 12)]
    assert kinds == [0, 1, 2, 3, 4]


def test_what_is_known_of_a_sequence_goes_with_it() -> None:
    lookup = PromptLookup()
    sequence = sequence_of([1, 2, 1, 2])
    lookup.look(sequence)
    assert len(lookup._chains) == 1
    del sequence
    assert len(lookup._chains) == 0


tokens = st.lists(st.integers(0, 2), max_size=40)


@given(tokens, tokens)
def test_tokens_that_come_one_by_one_are_found_like_those_that_were_there(prompt: list[int], output: list[int]) -> None:
    """And the agreement is what it is said to be."""
    growing = PairChains()
    for count in range(len(output) + 1):
        known = [*prompt, *output[:count]]
        agreement = growing.look(known)
        assert agreement == PairChains().look(known)
        if agreement:
            end = growing._found + 1
            assert end < len(known)
            assert known[end - agreement : end] == known[-agreement:]
            copied = growing.copy(5)
            assert copied[: len(known) - end] == known[end : end + 5]
        else:
            assert known[-2:] not in [known[i : i + 2] for i in range(len(known) - 2)] or len(known) < 2
