from __future__ import annotations

from pathlib import Path

import pytest

from penstock.hub.home import penstock_home


def test_home_is_the_variable_then_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("PENSTOCK_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert penstock_home() == Path("/home/ada/.cache/penstock")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert penstock_home() == Path("/cache/penstock")
    monkeypatch.setenv("PENSTOCK_HOME", "~/models")
    assert penstock_home() == Path("/home/ada/models")
