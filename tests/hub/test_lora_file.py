"""Which adapters a model is to have outlives the server, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.hub.lora_file import AdapterFile, StoredAdapter


def test_what_is_put_is_there_until_it_is_removed(tmp_path: Path) -> None:
    file = AdapterFile(tmp_path / "deep" / "adapters.json")
    assert file.read() == {}
    file.remove("nobody")
    assert not file.path.parent.exists()
    file.put("poet", StoredAdapter("/a/poet"))
    file.put("bard", StoredAdapter("/a/bard", pinned=True))
    file.put("poet", StoredAdapter("/b/poet"))
    assert AdapterFile(file.path).read() == {
        "poet": StoredAdapter("/b/poet"),
        "bard": StoredAdapter("/a/bard", pinned=True),
    }
    file.remove("poet")
    assert list(file.read()) == ["bard"]


def test_two_who_write_at_once_lose_nothing(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: AdapterFile(tmp_path / "a.json").put(name, StoredAdapter(f"/{name}")), names))
    assert sorted(AdapterFile(tmp_path / "a.json").read()) == sorted(names)


def test_every_model_has_its_own_in_penstock_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert AdapterFile.of("org/model").path == tmp_path / "adapters" / "org%2Fmodel.json"
    assert AdapterFile.of("org/model", str(tmp_path / "x.json")).path == tmp_path / "x.json"


@pytest.mark.parametrize("content", ["{", "[]", '{"poet": 5}', '{"poet": {}}'])
def test_file_that_cannot_be_read_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a file of adapters"):
        AdapterFile(tmp_path / "a.json").read()
