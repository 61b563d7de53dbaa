from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.tokenizer_source import TokenizerFiles
from penstock.text import token_bounds
from penstock.text.tokenizer import Tokenizer
from tests.text import small

BYTE_LEVEL = small.load(small.byte_level())
SENTENCEPIECE = small.load(small.sentencepiece())
both = st.sampled_from([BYTE_LEVEL, SENTENCEPIECE])
texts = st.text(st.characters(exclude_categories=["Cs"]))


def from_files(directory: Path, tokenizer: Tokenizer, config: dict[str, Any], **changes: Any) -> Tokenizer:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.to_json()) | changes))
    return Tokenizer.load(TokenizerFiles(path, config, None))


def of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens that are one byte each."""
    known = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    return [known[bytes([byte])] for byte in data]


@given(both, texts)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = "▁" in text and tokenizer is SENTENCEPIECE  # SentencePiece takes the mark itself for a space
    assert tokenizer.decode(ids, skip_special_tokens=False) == (text.replace("▁", " ") if spelled else text)


@given(st.lists(st.integers(0, 700)), st.booleans())
def test_byte_level_decoding_equals_the_library_s(ids: list[int], skip: bool) -> None:
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == BYTE_LEVEL._backend.decode(ids, skip)


@given(st.lists(st.one_of(st.integers(0, 2), st.integers(259, 700), texts)), st.booleans())
def test_sentencepiece_decoding_equals_the_library_s(parts: list[int | str], skip: bool) -> None:
    pieces = [[part] if isinstance(part, int) else of_bytes(SENTENCEPIECE, part.encode()) for part in parts]
    ids = [token_id for piece in pieces for token_id in piece]
    assert SENTENCEPIECE.decode(ids, skip_special_tokens=skip) == SENTENCEPIECE._backend.decode(ids, skip)


def test_whole_characters_survive_beside_a_broken_one() -> None:
    """The library would replace the whole run of byte tokens, after it was streamed."""
    assert SENTENCEPIECE.decode(of_bytes(SENTENCEPIECE, "é".encode() + b"\xff")) == "é�"


@given(both, texts)
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    prefix = " " if tokenizer.drops_leading_space and text else ""
    assert data.decode() == prefix + (text if tokenizer is BYTE_LEVEL else text.replace("▁", " "))


def test_token_text_shows_a_part_of_a_character_as_replacement() -> None:
    assert [BYTE_LEVEL.token_text(token_id) for token_id in of_bytes(BYTE_LEVEL, "aé".encode())] == ["a", "�", "�"]
    assert BYTE_LEVEL.token_text(1) == "<s>"


def test_ids_past_the_vocabulary_have_no_bytes() -> None:
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""


def test_a_batch_encodes_like_its_texts() -> None:
    alone = [SENTENCEPIECE.encode(text, add_special_tokens=True) for text in small.CORPUS]
    assert SENTENCEPIECE.encode_batch(small.CORPUS, add_special_tokens=True) == alone


def test_its_json_makes_the_same_tokenizer() -> None:
    copy = Tokenizer(tokenizers.Tokenizer.from_str(SENTENCEPIECE.to_json()), SENTENCEPIECE.special_tokens())
    assert copy.special_tokens() == SENTENCEPIECE.special_tokens()
    assert copy.special_ids == SENTENCEPIECE.special_ids
    for text in small.CORPUS:
        assert copy.encode(text, add_special_tokens=True) == SENTENCEPIECE.encode(text, add_special_tokens=True)


def test_what_encode_adds_is_said_by_the_file_and_not_by_its_configuration(tmp_path: Path) -> None:
    config = {"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = from_files(tmp_path, SENTENCEPIECE, config)
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *plain]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_files_give_what_transformers_gives(tmp_path: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    import transformers  # takes seconds

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = from_files(tmp_path, tokenizer, config)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*small.CORPUS, "</s> the <s>x", "  a", ""]:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == reference(text, add_special_tokens=add)["input_ids"]
            assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_tokens_named_by_the_configuration_are_special_only_if_the_vocabulary_has_them(tmp_path: Path) -> None:
    tokenizer = from_files(tmp_path, BYTE_LEVEL, {"eos_token": "<think>", "pad_token": "<pad>", "bos_token": None})
    assert tokenizer.special_ids == BYTE_LEVEL.special_ids | {BYTE_LEVEL.vocab_size - 1}
    assert tokenizer.vocab_size == BYTE_LEVEL.vocab_size
    assert tokenizer.bos_token is None


def test_a_file_s_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = from_files(tmp_path, BYTE_LEVEL, {}, truncation=truncation)
    assert len(tokenizer.encode(small.CORPUS[0], add_special_tokens=False)) > 4


def test_a_file_that_is_no_tokenizer_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelCorrupt, match="is not a tokenizer"):
        Tokenizer.load(TokenizerFiles(path, {}, None))


def test_a_decoder_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="BPEDecoder"):
        from_files(tmp_path, BYTE_LEVEL, {}, decoder={"type": "BPEDecoder", "suffix": "</w>"})
    with pytest.raises(ModelUnsupported, match="no decoder"):
        from_files(tmp_path, BYTE_LEVEL, {}, decoder=None)


def test_metaspace_decoders_are_understood(tmp_path: Path) -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    tokenizer = from_files(tmp_path, SENTENCEPIECE, {}, decoder=decoder)
    ids = tokenizer.encode("the words that come", add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == "the words that come"


def test_the_pieces_of_words_are_joined(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3}
    model = tokenizers.models.WordPiece(words, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("playing chess", add_special_tokens=False)
    assert ids == [1, 2, 3]
    assert tokenizer.decode(ids) == "playing chess"
    assert tokenizer.token_bytes(3) == b" chess"


def test_a_text_that_comes_often_is_tokenized_once() -> None:
    one, other, again = SENTENCEPIECE.encode_batch(["the fox", "a dog", "the fox"], add_special_tokens=True)
    assert one is again
    assert [one, other] == SENTENCEPIECE.encode_batch(["the fox", "a dog"], add_special_tokens=True)


def test_texts_can_be_refused_by_their_number_of_tokens_before_all_are_tokenized() -> None:
    seen = list[int]()

    def check(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 3:
            raise OverflowError

    many = ["a", "a long text of many words", *(f"word {index}" for index in range(1000))]
    with pytest.raises(OverflowError):
        SENTENCEPIECE.encode_batch(many, add_special_tokens=False, check=check)
    assert len(seen) == 2


@given(both, texts | st.text("the quick brown fox 日本語 \n", max_size=200))
def test_no_token_stands_for_more_bytes_than_the_longest(tokenizer: Tokenizer, text: str) -> None:
    longest = tokenizer.max_token_bytes
    assert longest is not None
    assert len(text.encode()) <= longest * len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), "▁")),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda backend: backend.add_special_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda backend: setattr(backend, "model", models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
)
def test_where_text_may_vanish_nothing_is_said_of_the_longest_token(change: Callable[[Any], object]) -> None:
    backend = tokenizers.Tokenizer.from_str(BYTE_LEVEL.to_json())
    assert token_bounds.max_token_bytes(backend) == BYTE_LEVEL.max_token_bytes
    change(backend)
    assert token_bounds.max_token_bytes(backend) is None
