import json

import pytest
import tokenizers

from penstock.text.fill_in import FillInMarks, find_marks
from penstock.text.tokenizer import Tokenizer
from tests.text import small


def test_a_model_has_marks_if_its_vocabulary_has_all_three() -> None:
    marks = FillInMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert find_marks(set(marks).__contains__) == marks
    assert find_marks(set(marks[:2]).__contains__) is None


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_are_found_among_a_tokenizers_added_tokens_and_each_is_one_token(is_special: bool) -> None:
    plain = small.load(small.byte_level())
    assert plain.fill_in is None
    backend = tokenizers.Tokenizer.from_str(plain.to_json())
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    backend.add_tokens([tokenizers.AddedToken(name, special=is_special, normalized=False) for name in names])
    found = Tokenizer.from_json(json.dumps(json.loads(backend.to_str())), {})
    assert found.fill_in is not None
    ids = found.encode(found.fill_in.prompt("a", "b"), add_special_tokens=True)
    (a,), (b,) = (found.encode(text, add_special_tokens=False) for text in "ab")
    first, second, third = (backend.token_to_id(name) for name in names)
    assert ids == [first, a, second, b, third]
