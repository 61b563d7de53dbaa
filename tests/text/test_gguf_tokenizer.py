from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core.errors import ModelCorrupt, ModelUnsupported
from penstock.core.tokenizer_source import TokenizerMetadata
from penstock.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.text import small

SENTENCEPIECE = small.sentencepiece()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def words(pre: str, text: str) -> list[str]:
    """How the rule named `pre` cuts a text."""
    pre_tokenizer = small.load(small.byte_level(pre))._backend.pre_tokenizer
    assert pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "It|'s| 12345| IT|'|S| aB|  | b|\n|\n|x"),
        ("smollm", "It|'s| |1|2|3|4|5| IT|'|S| aB|  | b|\n|\n|x"),
        ("llama-bpe", "It|'s| |123|45| IT|'S| aB|  | b|\n\n|x"),
        ("qwen2", "It|'s| |1|2|3|4|5| IT|'S| aB|  | b|\n\n|x"),
        ("tekken", "It|'s| |1|2|3|4|5| IT|'S| a|B|  | b|\n\n|x"),
        ("dbrx", "It|'s| |123|45| IT|'S| aB|  | b|\n\n|x"),
        ("gpt-4o", "It's| |123|45| IT'S| a|B|  | b|\n\n|x"),
    ],
)
def test_each_rule_cuts_words_its_own_way(pre: str, expected: str) -> None:
    assert words(pre, expected.replace("|", "")) == expected.split("|")


def test_qwen2_composes_characters_first() -> None:
    tokenizer = small.load(small.byte_level("qwen2"))
    assert tokenizer.decode(tokenizer.encode("cafe\u0301", add_special_tokens=False)) == "caf\u00e9"


def test_llama3_takes_a_word_of_the_vocabulary_whole() -> None:
    def with_a_word_no_merge_makes(pre: str) -> Tokenizer:
        metadata = small.byte_level(pre)
        metadata["tokenizer.ggml.tokens"].append("zebra")
        metadata["tokenizer.ggml.token_type"].append(1)
        return small.load(metadata)

    assert len(with_a_word_no_merge_makes("llama-bpe").encode("zebra", add_special_tokens=False)) == 1
    assert len(with_a_word_no_merge_makes("gpt-2").encode("zebra", add_special_tokens=False)) > 1


@pytest.mark.parametrize(
    ("metadata", "added"),
    [
        (small.byte_level("smollm"), []),
        (small.byte_level("smollm", add_bos_token=True), [1]),
        (small.byte_level("llama-bpe"), [1]),
        (small.byte_level("llama-bpe", add_bos_token=False), []),
        (small.sentencepiece(), [1]),
        (small.sentencepiece(add_bos_token=False, add_eos_token=True), [2]),
    ],
)
def test_what_encode_adds_follows_the_file_and_then_the_kind(metadata: dict[str, Any], added: list[int]) -> None:
    tokenizer = small.load(metadata)
    special = set(tokenizer.encode("the", add_special_tokens=True)) - set(
        tokenizer.encode("the", add_special_tokens=False)
    )
    assert sorted(special) == added


def test_control_tokens_are_special_and_user_defined_ones_only_whole() -> None:
    tokenizer = small.load(small.byte_level())
    think = tokenizer.vocab_size - 1
    ids = tokenizer.encode("</s><think>", add_special_tokens=False)
    assert ids == [2, think]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "<think>"
    assert tokenizer.special_tokens() == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_phi_3_drops_the_blanks_behind_its_own_tokens() -> None:
    phi = small.load(SENTENCEPIECE | {"general.architecture": "phi3"})
    llama = small.load(SENTENCEPIECE | {"general.architecture": "llama"})
    assert phi.encode("</s>\n the", add_special_tokens=False) == phi.encode("</s>the", add_special_tokens=False)
    assert llama.encode("</s>\n the", add_special_tokens=False) != llama.encode("</s>the", add_special_tokens=False)
    for kept in ("<s> the", "<unk> the"):
        assert phi.encode(kept, add_special_tokens=False) == llama.encode(kept, add_special_tokens=False)


@given(st.text("".join(small.CORPUS) + "▁", max_size=60))
def test_sentencepiece_joins_the_best_scored_neighbours_first(text: str) -> None:
    assume(text and not any(special in text for special in small.SPECIAL))
    expected = list(joined(SENTENCEPIECE, "▁" + text.replace(" ", "▁")))
    assert small.load(SENTENCEPIECE).encode(text, add_special_tokens=False) == expected


def joined(metadata: dict[str, Any], text: str) -> Iterable[int]:
    """SentencePiece's BPE as its paper tells it."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    first_piece = 259
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {token: scores[ids[token]] for token in tokens[first_piece:]}
    symbols = list(text)
    while True:
        joins = [
            (-pieces[left + right], at) for at, (left, right) in enumerate(pairwise(symbols)) if left + right in pieces
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    for symbol in symbols:
        yield from [ids[symbol]] if symbol in pieces else (ids[f"<0x{byte:02X}>"] for byte in symbol.encode())


def test_an_unknown_word_rule_is_refused_by_its_name() -> None:
    with pytest.raises(ModelUnsupported, match="'klingon'"):
        small.load(small.byte_level("klingon"))


def test_an_unknown_kind_is_refused_by_its_name() -> None:
    with pytest.raises(ModelUnsupported, match="'bert'"):
        small.load(small.byte_level() | {"tokenizer.ggml.model": "bert"})


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges"])
def test_a_missing_part_is_named(key: str) -> None:
    metadata = small.byte_level()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelCorrupt, match=key):
        small.load(metadata)


def test_merges_that_do_not_fit_the_vocabulary_are_corrupt() -> None:
    with pytest.raises(ModelCorrupt, match="merges"):
        small.load(small.byte_level() | {"tokenizer.ggml.merges": ["no such"]})


@pytest.mark.slow
def test_smollm2_is_what_its_authors_published(smollm2: Tokenizer) -> None:
    assert smollm2.special_tokens() == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("<|im_start|>user\n", add_special_tokens=True) == [1, 4093, 198]  # no BOS of its own


@pytest.fixture(scope="session")
def reference(smollm2_file: Path) -> Any:
    """transformers' own conversion, with the one thing it does not know of: digits stand alone."""
    import transformers  # takes seconds
    from tokenizers import pre_tokenizers

    converted = transformers.AutoTokenizer.from_pretrained(smollm2_file.parent, gguf_file=smollm2_file.name)
    converted.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return converted


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.lists(st.one_of(texts, st.sampled_from(["<|im_start|>", "<|im_end|>", "<repo_name>", " ", "\n", "2024 "]))))
def test_smollm2_encodes_any_text_like_the_reference(smollm2: Tokenizer, reference: Any, parts: list[str]) -> None:
    text = "".join(parts)
    ids = smollm2.encode(text, add_special_tokens=True)
    assert ids == reference(text)["input_ids"]
    assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_smollm2_encodes_code_like_the_reference(smollm2: Tokenizer, reference: Any) -> None:
    for module in ("argparse", "codecs", "decimal", "html.entities", "typing"):
        __import__(module)
        text = Path(str(sys.modules[module].__file__)).read_text()
        assert smollm2.encode(text, add_special_tokens=False) == reference(text)["input_ids"]


@pytest.mark.slow
@pytest.mark.drill
def test_smollm2_is_built_in_less_than_a_third_of_a_second(smollm2_source: TokenizerMetadata) -> None:
    start = time.process_time()
    Tokenizer.load(smollm2_source)
    assert time.process_time() - start < 0.3
