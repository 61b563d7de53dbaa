from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from penstock.workload.conversations import Conversation, Replayed, Synthetic, clipped
from penstock.workload.lengths import Lengths
from penstock.workload.trace import BLOCK_TOKENS, Arrival
from penstock.workload.words import COMMON, LONG, SHORT, Scale

WORDS = [f" word{number}" for number in range(5000)]
EXACT = Scale()


def words_of(conversation: Conversation) -> list[str]:
    (turn,) = conversation.turns
    return str(turn.messages[-1]["content"]).split()


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def made(**options: object) -> Synthetic:
    settings = {"prompt": Lengths.parse("20:40"), "output": Lengths.parse("5")} | options
    return Synthetic(WORDS, EXACT, "seed", **settings)  # type: ignore[arg-type]


BLOCKS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(one=BLOCKS, other=BLOCKS, cut=st.integers(0, BLOCK_TOKENS - 1))
def test_equal_block_names_are_equal_words_and_share_as_much_as_in_the_trace(
    one: list[int], other: list[int], cut: int
) -> None:
    arrivals = [Arrival(0.0, len(blocks) * BLOCK_TOKENS - cut, 3, tuple(blocks)) for blocks in (one, other)]
    replayed = Replayed(arrivals, WORDS, EXACT, "seed")
    texts = [words_of(replayed.conversation(number)) for number in range(2)]
    assert [len(text) for text in texts] == [arrival.prompt_tokens for arrival in arrivals]
    expected = min(shared(one, other) * BLOCK_TOKENS, *map(len, texts))
    assert expected <= shared(*texts) <= expected + 3  # two blocks may begin with the same words by chance


def test_a_trace_without_blocks_shares_nothing_and_is_the_same_again() -> None:
    arrivals = [Arrival(float(number), 50, 3) for number in range(3)]
    replayed = Replayed(arrivals, WORDS, EXACT, "seed", speed=2.0)
    texts = [words_of(replayed.conversation(number)) for number in range(3)]
    assert shared(texts[0], texts[1]) < 3
    assert texts[1] == words_of(Replayed(arrivals, WORDS, EXACT, "seed").conversation(1))
    assert [replayed.at_s(number) for number in range(3)] == [0.0, 0.5, 1.0]


def test_a_request_beyond_the_context_is_cut_at_its_end_so_that_it_still_shares_its_beginning() -> None:
    arrivals = [Arrival(0.0, 4 * BLOCK_TOKENS, 10, (1, 2, 3, 4)), Arrival(0.0, 600, 10, (1, 2))]
    replayed = Replayed(arrivals, WORDS, EXACT, "seed", context=1000)
    long, short = (words_of(replayed.conversation(number)) for number in range(2))
    assert (len(long), len(short), shared(long, short)) == (990, 600, 600)
    assert replayed.num_clipped == 1


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 5000))
def test_what_is_clipped_fits_and_keeps_both_a_prompt_and_an_answer(prompt: int, output: int, context: int) -> None:
    kept_prompt, kept_output = clipped(prompt, output, context)
    assert 1 <= kept_prompt <= prompt
    assert 1 <= kept_output <= output
    assert kept_prompt + kept_output <= context


def test_the_nth_conversation_is_always_the_same_and_no_other() -> None:
    assert made().conversation(7) == made().conversation(7)
    assert shared(words_of(made().conversation(7)), words_of(made().conversation(8))) < 3
    assert 20 <= len(words_of(made().conversation(7))) <= 40


def test_a_system_prompt_is_shared_by_those_of_its_group() -> None:
    source = made(shared_tokens=100, num_prefixes=2)
    systems = [source.conversation(number).turns[0].messages[0] for number in range(4)]
    assert [system["role"] for system in systems] == ["system"] * 4
    assert systems[0] == systems[2] != systems[1] == systems[3]
    assert len(str(systems[0]["content"]).split()) == 100


def test_turns_ask_something_new_each_after_a_pause_and_are_one_session() -> None:
    conversation = made(num_turns=Lengths.parse("4"), think_s=2.0).conversation(3)
    assert len({str(turn.messages) for turn in conversation.turns}) == 4
    assert conversation.turns[0].think_s == 0.0
    assert all(turn.think_s > 0 for turn in conversation.turns[1:])
    assert conversation.session is not None
    assert made().conversation(3).session is None


def test_a_conversation_ends_where_the_context_does() -> None:
    conversation = made(num_turns=Lengths.parse("50"), context=200, prompt=Lengths.parse("40")).conversation(0)
    assert 4 <= len(conversation.turns) < 6


@given(per_word=st.floats(0.5, 3), overhead=st.integers(0, 100), num_tokens=st.integers(200, 5000))
def test_a_scale_turns_tokens_into_the_words_that_make_them(per_word: float, overhead: int, num_tokens: int) -> None:
    short, long = (round(overhead + per_word * num_words) for num_words in (SHORT, LONG))
    num_words = Scale.of(short, long).words(num_tokens)
    assert abs(overhead + per_word * num_words - num_tokens) <= 0.02 * num_tokens + 5


def test_common_words_are_many_and_all_different() -> None:
    assert len(set(COMMON)) == len(COMMON) > 200
