from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.api.rerank import parse_rerank, parse_score, ranking
from penstock.core.errors import InvalidRequest


def rerank(**values: object) -> Any:
    return parse_rerank(
        json.dumps({"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], **values}).encode()
    )


def results(**values: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(ranking("1", "m", rerank(**values), [0.2, 0.9, 0.5], 7))["results"]
    return found


def test_the_best_come_first_with_their_place_among_the_documents() -> None:
    assert [(one["index"], one["document"]["text"]) for one in results()] == [(1, "b"), (2, "c"), (0, "a")]
    assert [one["index"] for one in results(top_n=2)] == [1, 2]
    assert len(results(top_n=0)) == len(results(top_n=9)) == 3
    assert "document" not in results(return_documents=False)[0]


@pytest.mark.parametrize(
    "values",
    [
        {"query": ""},
        {"documents": []},
        {"documents": [""]},
        {"documents": [{"txt": "a"}]},
        {"top_n": -1},
        {"queri": "a"},
    ],
)
def test_bad_requests_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        rerank(**values)


def pairs(text_1: object, text_2: object, names: tuple[str, str] = ("text_1", "text_2")) -> list[tuple[str, str]]:
    return parse_score(json.dumps({"model": "m", names[0]: text_1, names[1]: text_2}).encode()).pairs()


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_texts_are_scored_one_to_one_or_one_to_many(names: tuple[str, str]) -> None:
    assert pairs("a", "b", names) == [("a", "b")]
    assert pairs("a", ["b", "c"], names) == pairs(["a"], ["b", "c"], names) == [("a", "b"), ("a", "c")]
    assert pairs(["a", "b"], ["c", "d"], names) == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    ("names", "param"),
    [
        (("text_1", "documents"), "text_2"),
        (("queries", "text_2"), "text_1"),
        (("text_1", "user"), "text_2"),
        (("documents", "user"), "queries"),
        (("user", "user"), "text_1"),
    ],
)
def test_names_of_two_texts_go_together(names: tuple[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest, match="is required") as refused:
        pairs("a", "b", names)
    assert refused.value.param == param


def test_both_pairs_of_names_are_refused() -> None:
    body = {"model": "m", "text_1": "a", "text_2": "b", "documents": "c"}
    with pytest.raises(InvalidRequest, match="documents: cannot go with text_1 and text_2"):
        parse_score(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("text_1", "text_2"), [(["a", "b"], "c"), (["a", "b"], ["c"]), (["a", "b"], ["c"] * 3), ("", "b")]
)
def test_numbers_that_do_not_fit_are_refused(text_1: object, text_2: object) -> None:
    with pytest.raises(InvalidRequest):
        pairs(text_1, text_2)
