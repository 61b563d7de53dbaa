"""The quickstart, followed word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.reader import reading

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"


def test_the_quickstart_works_as_it_is_written(tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        printed = reader.follow(PAGE.read_text())
    (asked,) = (json.loads(text) for line, text in printed.items() if "capital of France" in line)
    assert "Paris" in asked["choices"][0]["message"]["content"]
    (answered,) = (json.loads(text) for line, text in printed.items() if "Authorization" in line)
    assert answered["usage"]["completion_tokens"] <= 64
    assert "v1=50 v2=50" in " ".join(printed)
    assert "v2" in printed["penstock routes show smollm2"]
    assert "OUTPUT" in printed["penstock usage acme"]
