from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text import small

BYTE_LEVEL = small.load(small.byte_level())
SENTENCEPIECE = small.load(small.sentencepiece())
UNPREFIXED = small.load(small.sentencepiece(add_space_prefix=False))
tokenizers = st.sampled_from([BYTE_LEVEL, SENTENCEPIECE, UNPREFIXED])
# Ids past the vocabulary happen: embeddings are often padded.
ids_in_pieces = st.lists(st.lists(st.integers(0, 700), max_size=4), max_size=12)
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the  🙂é\n")))


def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.flush()


@settings(max_examples=examples(100))
@given(tokenizers, ids_in_pieces, st.booleans())
def test_pieces_give_what_decoding_all_ids_gives(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    ids = [token_id for piece in pieces for token_id in piece]
    assert stream(detokenizer, pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(tokenizers, ids_in_pieces)
def test_what_was_pushed_is_never_taken_back(tokenizer: Tokenizer, pieces: list[list[int]]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text, ids = "", list[int]()
    for piece in pieces:
        text += detokenizer.push(piece)
        ids += piece
        assert tokenizer.decode(ids).startswith(text)


@given(tokenizers, texts, texts)
def test_text_goes_on_from_its_prompt(tokenizer: Tokenizer, prompt: str, answer: str) -> None:
    ids = tokenizer.encode(prompt + answer, add_special_tokens=True)
    for middle in range(len(ids) + 1):
        start = Detokenizer(tokenizer)
        before = start.push(ids[:middle])
        after = stream(Detokenizer(tokenizer, prompt_ids=ids[:middle]), [[token_id] for token_id in ids[middle:]])
        assert before + after == tokenizer.decode(ids)


@given(tokenizers, texts)
def test_a_stream_of_whole_characters_is_never_broken(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pushed = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert "�" in text or "�" not in "".join(pushed)


def test_an_answer_keeps_the_space_that_parts_it_from_its_prompt() -> None:
    prompt, ids = (SENTENCEPIECE.encode(text, add_special_tokens=True) for text in ("what they've", "done"))
    assert Detokenizer(SENTENCEPIECE, prompt_ids=prompt).push(ids[1:]) == " done"
    assert Detokenizer(SENTENCEPIECE, prompt_ids=prompt[:1]).push(ids[1:]) == "done"  # nothing but BOS before it


def test_an_unfinished_character_is_held_and_flushed_as_replacement() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    *first, last = "🙂".encode()
    of_byte = {BYTE_LEVEL.token_bytes(token_id): token_id for token_id in range(BYTE_LEVEL.vocab_size)}
    ids = [of_byte[bytes([byte])] for byte in (*first, last)]
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "🙂"]
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.flush() == "�"


@pytest.mark.slow
@settings(max_examples=examples(80))
@given(st.lists(st.lists(st.integers(0, 49151), max_size=6), max_size=30))
def test_smollm2_streams_what_its_library_decodes(smollm2: Tokenizer, pieces: list[list[int]]) -> None:
    ids = [token_id for piece in pieces for token_id in piece]
    assert stream(Detokenizer(smollm2), pieces) == smollm2._backend.decode(ids)
