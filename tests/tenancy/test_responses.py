"""The store of responses: what is kept for whom, for how long, and what becomes of those that nobody makes any more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from penstock.core.errors import InvalidValue
from penstock.tenancy.responses import ResponseBook, ResponseLimits
from penstock.tenancy.store import Store, open_store

LIMITS = ResponseLimits(ttl_s=100.0, max_responses=10, max_bytes=10_000)


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def opened(store_url: str) -> Iterator[Store]:
    with open_store(store_url) as found:
        yield found


@pytest.fixture
def book(opened: Store, now: list[float]) -> ResponseBook:
    return ResponseBook(opened._database, lambda: now[0])


def add(book: ResponseBook, response_id: str, tenant: str = "acme", **options: Any) -> None:
    values: dict[str, Any] = {
        "previous_id": None,
        "status": "completed",
        "input": f'["{response_id}"]',
        "response": "{}",
        "limits": LIMITS,
    }
    book.add(tenant, response_id, **values | options)


def kept(book: ResponseBook, *ids: str, tenant: str = "acme") -> list[str]:
    return [response_id for response_id in ids if book.find(tenant, response_id) is not None]


def test_a_response_is_its_tenants_alone(book: ResponseBook) -> None:
    add(book, "a")
    found = book.find("acme", "a")
    assert found is not None
    assert (found.status, found.input, found.response, found.is_active) == ("completed", '["a"]', "{}", False)
    assert book.find("other", "a") is None
    assert not book.delete("other", "a")
    add(book, "a", tenant="other", input="[]")
    assert book.delete("other", "a")
    assert kept(book, "a") == ["a"]


def test_a_conversation_is_all_of_its_turns(book: ResponseBook) -> None:
    add(book, "a")
    add(book, "b", previous_id="a")
    add(book, "c", previous_id="b")
    add(book, "b", tenant="other", previous_id="a")
    assert [turn.id for turn in book.conversation("acme", "c")] == ["a", "b", "c"]
    assert [turn.id for turn in book.conversation("other", "b")] == ["b"]
    assert book.conversation("acme", "d") == []
    book.delete("acme", "a")
    assert [(turn.id, turn.previous_id) for turn in book.conversation("acme", "c")] == [("b", "a"), ("c", "b")]


def test_a_response_is_kept_for_its_time(book: ResponseBook, opened: Store, now: list[float]) -> None:
    add(book, "a")
    now[0] += LIMITS.ttl_s - 1
    add(book, "b", previous_id="a")
    assert kept(book, "a", "b") == ["a", "b"]
    now[0] += 1
    assert kept(book, "a", "b") == ["b"]
    assert [turn.id for turn in book.conversation("acme", "b")] == ["b"]
    add(book, "c")
    with opened._database.reading() as execute:
        assert sorted(row[0] for row in execute("SELECT id FROM responses")) == ["b", "c"]


def test_the_oldest_go_when_there_are_too_many(book: ResponseBook, now: list[float]) -> None:
    limits = ResponseLimits(100.0, 3, 10_000)
    add(book, "other", tenant="other", limits=limits)
    for response_id in "abcd":
        now[0] += 1
        add(book, response_id, limits=limits, **{"owner": "me", "status": "queued"} if response_id == "a" else {})
    assert kept(book, *"abcd") == ["a", "c", "d"]  # that which is being made stays
    assert kept(book, "other", tenant="other") == ["other"]


def test_the_oldest_go_when_they_are_too_large(book: ResponseBook, now: list[float]) -> None:
    limits = ResponseLimits(100.0, 10, 1000)
    for response_id in "abc":
        now[0] += 1
        add(book, response_id, limits=limits, response=f'"{"é" * 200}"')
    assert kept(book, *"abc") == ["b", "c"]
    with pytest.raises(InvalidValue):
        add(book, "d", limits=limits, response="x" * 1001)
    assert kept(book, *"abc") == ["b", "c"]


def test_one_that_is_being_made_ends_once(book: ResponseBook) -> None:
    add(book, "a", status="queued", owner="me", lease_s=30.0)
    assert not book.end("other", "a", status="completed", response="1")
    assert not book.end("acme", "a", status="completed", response="1", owner="you")
    assert book.end("acme", "a", status="cancelled", response="2")
    assert not book.end("acme", "a", status="completed", response="3", owner="me")
    found = book.find("acme", "a")
    assert found is not None
    assert (found.status, found.response, found.is_background, found.owner_until) == ("cancelled", "2", True, None)


def test_an_owner_renews_its_lease_and_hears_what_is_no_longer_its(book: ResponseBook, now: list[float]) -> None:
    for response_id in "abc":
        add(book, response_id, status="in_progress", owner="me", lease_s=30.0)
    add(book, "d", status="in_progress", owner="you", lease_s=30.0)
    book.end("acme", "a", status="cancelled", response="{}")
    book.delete("acme", "b")
    now[0] += 20
    assert book.renew("me", 30.0) == {("acme", "c")}
    now[0] += 20
    mine, yours = book.find("acme", "c"), book.find("acme", "d")
    assert mine is not None
    assert yours is not None
    assert not book.is_orphan(mine)
    assert book.is_orphan(yours)


def test_a_tenant_that_is_removed_takes_its_responses_along(book: ResponseBook, opened: Store) -> None:
    opened.add_tenant({"id": "acme"})
    add(book, "a")
    opened.remove_tenant("acme")
    assert kept(book, "a") == []
    add(book, "b")
    assert (book.forget("acme"), book.forget("acme")) == (1, 0)


def test_what_its_owner_leaves_another_claims_but_not_for_ever(book: ResponseBook, now: list[float]) -> None:
    add(book, "a", status="in_progress", owner="one", lease_s=30.0, request='{"x": 1}', key_id="key")
    add(book, "b", status="in_progress", owner="one", lease_s=30.0)  # of a version that kept no requests
    assert book.claim("two", 30.0, 10) == []
    now[0] += 30.0
    orphan = book.find("acme", "b")
    assert orphan is not None
    assert book.is_orphan(orphan)
    for owner in ("two", "three"):
        found = book.find("acme", "a")
        assert found is not None
        assert not book.is_orphan(found)
        assert book.claim(owner, 30.0, 10) == [("acme", "a", "key", '{"x": 1}')]
        assert book.claim("other", 30.0, 10) == []
        now[0] += 30.0
    assert book.claim("four", 30.0, 10) == []
    found = book.find("acme", "a")
    assert found is not None
    assert book.is_orphan(found)  # three processes have died of it, or with it
    assert not book.end("acme", "a", status="completed", response="{}", owner="two")


def test_an_owner_that_ends_in_good_order_leaves_at_once_and_costs_no_try(book: ResponseBook) -> None:
    add(book, "a", status="in_progress", owner="one", lease_s=30.0, request="{}")
    for before, owner in pairwise(("one", "two", "three", "four", "five")):
        book.release(before)
        assert [claimed.id for claimed in book.claim(owner, 30.0, 10)] == ["a"]
    assert book.end("acme", "a", status="completed", response="{}", owner="five")
    assert book.claim("six", 30.0, 10) == []
