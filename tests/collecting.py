"""Test files that hold none of the tests that a run wants, found by their text: what is not imported takes no time. So
do directories of such files, with their conftest.py.

A run of the slow tests would else import every file, in each of its workers, and leave out two of three. A marker is on
all tests of a file where its `pytestmark` has it, and on none where neither the file nor a conftest.py above it has the
word; `check` fails where that does not hold, so that no test is missed in silence.

Tests below a conftest.py that seeds torch compute with models, and are slow one and all: the fast part is what decides
and serves.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

MARKERS = ("slow", "drill")
ROOT = Path(__file__).parent
SEEDED = "from tests.seeded import"  # in a conftest.py: a fixture that imports torch before each test below it
_FOR_ALL = re.compile(r"^pytestmark = .*", re.MULTILINE)


@cache
def is_left_out(path: Path, markers: str) -> bool:
    if not markers:
        return False
    if path.is_dir():
        files = list(path.rglob("test_*.py"))
        return bool(files) and all(is_left_out(file, markers) for file in files)
    is_tests = path.suffix == ".py" and path.name.startswith("test_")
    return is_tests and has_none_of(path.read_text(), _conftests(path.parent), markers)


def has_none_of(text: str, conftests: str, markers: str) -> bool:
    """Whether no test of a file with this text can be among those of the marker expression."""
    marked = {name: True for name in MARKERS if f"mark.{name}" in " ".join(_FOR_ALL.findall(text))}
    marked |= {name: False for name in MARKERS if name not in text + conftests}
    if SEEDED in conftests:
        marked["slow"] = True
    unknown = sorted(set(re.findall(r"\w+", markers)) - {"and", "or", "not", *marked})
    expression = Expression.compile(markers)
    for values in itertools.product((False, True), repeat=len(unknown)):
        known = marked | dict(zip(unknown, values, strict=True))
        if expression.evaluate(lambda name, /, _known=known, **_: _known[name]):
            return False
    return True


def mark_models(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if SEEDED in _conftests(item.path.parent):
            item.add_marker("slow")


def check(items: Iterable[pytest.Item]) -> None:
    """Every marked test is in a file that a run of its marker would import."""
    for item in items:
        for name in MARKERS:
            if item.get_closest_marker(name) and is_left_out(item.path, name):
                raise pytest.UsageError(f"{item.nodeid} is {name}, but neither its file nor a conftest.py has the word")


@cache
def _conftests(directory: Path) -> str:
    """Their text, from this directory up to that of all tests, whose own marks nothing."""
    if directory == ROOT or ROOT not in directory.parents:
        return ""
    own = directory / "conftest.py"
    return (own.read_text() if own.exists() else "") + _conftests(directory.parent)
