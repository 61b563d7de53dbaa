"""Promises on the security page: each names a file of tests, and that file is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "security.md"


def promises() -> list[tuple[str, list[str]]]:
    section = PAGE.read_text().partition("## Promises")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), re.findall(r"`(tests/\S+)`", row[-1])) for row in rows if row[0].strip() != "promise"]


def test_every_promise_has_a_test() -> None:
    assert len(promises()) > 20
    for promise, files in promises():
        assert files, promise
        for file in files:
            assert "def test_" in (ROOT / file).read_text(), f"{promise}: {file}"
