from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, Conflict, InvalidValue, KeyNotFound
from penstock.core.watermark import Scheme
from penstock.hub.watermarks import WatermarkFile


@pytest.fixture
def file(tmp_path: Path) -> WatermarkFile:
    return WatermarkFile(tmp_path / "deep" / "watermarks.json")


def test_a_watermark_is_found_as_it_was_added(file: WatermarkFile) -> None:
    assert file.read() == {}
    file.add("acme", scheme="gumbel", width=3)
    file.add("other", delta=1.5)
    found = file.find("acme")
    assert (found.scheme, found.width) == (Scheme.GUMBEL, 3)
    assert file.find("other").delta == 1.5
    assert file.find("other").secret != found.secret
    file.remove("acme")
    assert list(file.read()) == ["other"]


def test_nobody_else_may_read_it(file: WatermarkFile) -> None:
    file.add("acme")
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.path.parent.iterdir()} == {0o600}
    file.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        file.find("acme")


@pytest.mark.parametrize(
    "values",
    [{"name": "Bad Name"}, {"gamma": 2.0}, {"delta": -1}, {"width": 0}, {"scheme": "gumbel", "seeding": "self"}],
)
def test_bad_values_are_refused_and_nothing_is_kept(file: WatermarkFile, values: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        file.add(**{"name": "acme"} | values)  # type: ignore[arg-type]
    assert file.read() == {}


def test_a_name_stands_for_one_secret_for_ever(file: WatermarkFile) -> None:
    secret = file.add("acme").secret
    with pytest.raises(Conflict):
        file.add("acme", delta=3.0)
    assert file.read()["acme"].secret == secret


def test_an_unknown_name_is_told_with_the_nearest_known_one(file: WatermarkFile) -> None:
    file.add("acme")
    with pytest.raises(KeyNotFound, match="did you mean 'acme'"):
        file.find("acne")
    with pytest.raises(KeyNotFound):
        file.remove("acne")


def test_what_a_damaged_file_holds_is_not_repeated(file: WatermarkFile) -> None:
    secret = file.add("acme").secret
    file.path.write_text(f'{{"acme": {{"secret": "{secret}x"}}}}')
    with pytest.raises(ConfigError) as told:
        file.find("acme")
    assert secret not in str(told.value)


def test_what_several_add_at_once_is_all_kept(file: WatermarkFile) -> None:
    names = [f"mark-{i}" for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file.add, names))
    assert sorted(file.read()) == sorted(names)


def test_it_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_WATERMARKS", raising=False)
    assert WatermarkFile.at(None).path == tmp_path / "watermarks.json"
    monkeypatch.setenv("PENSTOCK_WATERMARKS", str(tmp_path / "other"))
    assert WatermarkFile.at(None).path == tmp_path / "other"
    assert WatermarkFile.at(str(tmp_path / "third")).path == tmp_path / "third"
