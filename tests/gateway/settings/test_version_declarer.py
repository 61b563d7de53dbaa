from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from penstock.core.errors import InvalidValue, StoreUnavailable
from penstock.gateway.settings.version_declarer import VersionDeclarer
from penstock.observe.background import errors
from penstock.tenancy.routes import Declared
from tests.waiting import eventually_async

FIRST, SECOND = (Declared("m", {version: 100.0}, {version: 0.0}) for version in ("v1", "v2"))


class Book:
    """Answers when it may, and not at first."""

    def __init__(self, num_failures: int = 0, failure: Exception | None = None) -> None:
        self.told: list[list[Declared]] = []
        self.declared: list[list[Declared]] = []
        self.may_answer = threading.Event()
        self._num_failures = num_failures
        self._failure = failure or StoreUnavailable("away")

    def declare(self, routes: Iterable[Declared]) -> None:
        self.declared.append(list(routes))

    def add_versions(self, routes: Iterable[Declared]) -> list[Declared]:
        self.told.append(list(routes))
        self.may_answer.wait(60)
        if len(self.told) <= self._num_failures:
            raise self._failure
        return list(routes)


async def test_what_is_found_while_the_store_is_told_is_told_next() -> None:
    book, adopted = Book(), list[list[Declared]]()
    declarer = VersionDeclarer(book, adopted.append)
    declarer.add([FIRST])
    await eventually_async(lambda: book.told == [[FIRST]])
    declarer.add([FIRST, SECOND])
    book.may_answer.set()
    await eventually_async(lambda: adopted == [[FIRST], [FIRST, SECOND]])
    declarer.add([SECOND])
    await eventually_async(lambda: adopted[2:] == [[SECOND]])


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), ValueError("a bug"), InvalidValue("not that")])
async def test_a_store_that_is_away_is_told_again(failure: Exception) -> None:
    book, adopted = Book(num_failures=2, failure=failure), list[list[Declared]]()
    before = errors().get("version declarer", 0)
    book.may_answer.set()
    declarer = VersionDeclarer(book, adopted.append, again_s=0.0)
    declarer.declare([SECOND])
    declarer.add([FIRST])
    await eventually_async(lambda: adopted == [[FIRST]])
    assert (book.declared, book.told) == ([[SECOND]] * 3, [[FIRST]] * 3)
    assert errors()["version declarer"] == before + 2


async def test_what_a_gateway_cannot_take_over_is_told_again() -> None:
    book, adopted = Book(), list[list[Declared]]()
    book.may_answer.set()

    def adopt(found: list[Declared]) -> None:
        adopted.append(found)
        if len(adopted) == 1:
            raise ValueError("a bug")

    declarer = VersionDeclarer(book, adopt, again_s=0.0)
    declarer.declare([SECOND])
    declarer.add([FIRST])
    await eventually_async(lambda: adopted == [[FIRST], [FIRST]])
    assert book.declared == [[SECOND], [SECOND]]


async def test_versions_that_were_found_are_added_again_to_a_file_that_was_read_again() -> None:
    book, adopted = Book(), list[list[Declared]]()
    book.may_answer.set()
    declarer = VersionDeclarer(book, adopted.append)
    declarer.add([FIRST])
    await eventually_async(lambda: adopted == [[FIRST]])
    declarer.declare([SECOND])
    await eventually_async(lambda: adopted == [[FIRST], [FIRST]])
    assert book.declared == [[], [SECOND]]
