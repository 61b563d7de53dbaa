from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from penstock.api.openai.embeddings import MAX_TEXTS, embedding_list, parse_embedding, shortened
from penstock.core.errors import InvalidRequest


def parse(**values: object) -> list[str | list[int]]:
    return parse_embedding(json.dumps({"model": "m", **values}).encode()).inputs(100)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_input_may_have_all_four_forms(given: object, texts: object) -> None:
    assert parse(input=given) == texts


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "input: is required"),
        ({"input": []}, "input: must be of length >= 1"),
        ({"input": ""}, "input: a text is empty"),
        ({"input": ["a", ""]}, "input: a text is empty"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "mixture"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "more than 2048 texts"),
        ({"input": [1, 100]}, "no token has the id 100"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: 'int8' is not one of 'float', 'base64'"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "inputs": "b"}, "did you mean 'input'"),
    ],
)
def test_what_is_wrong_is_told(values: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        parse(**values)
    assert problem in told.value.message


def test_both_forms_hold_the_same_numbers_and_usage_comes_last() -> None:
    vectors = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    plain, packed = (embedding_list("m", vectors, form, 17) for form in ("float", "base64"))
    assert np.array([one["embedding"] for one in json.loads(plain)["data"]], np.float32).tolist() == vectors.tolist()
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in json.loads(packed)["data"]]
    assert np.stack(found).tolist() == vectors.tolist()
    assert plain.endswith(b'"usage":{"prompt_tokens":17,"total_tokens":17}}')


def test_fewer_dimensions_are_of_length_one_again() -> None:
    vectors = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
    cut = shortened(vectors, 3)
    assert cut.shape == (4, 3)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(cut[0] / cut[0, 0], vectors[0, :3] / vectors[0, 0], rtol=1e-5)
    assert shortened(vectors, None) is vectors
