"""The kernels are compiled once, by whoever comes first, and never left half-written."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.model.ops import build
from penstock.model.ops.build import KernelsUnavailable, build_kernels

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    (sources / "two.c").write_text("int two(void) { return 2; }\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CC", raising=False)
    return sources


@needs_compiler
def test_of_two_builds_at_once_one_compiles_and_the_other_waits(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked: list[Path] = []
    link = build._link

    def counted(compiler: list[str], directory: Path) -> Path:
        linked.append(directory)
        return link(compiler, directory)

    monkeypatch.setattr(build, "_link", counted)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build_kernels(), range(2))
    assert first == second
    assert list(first.parent.iterdir()) == [first]
    assert len(linked) == 1


@needs_compiler
def test_library_is_built_again_only_when_a_source_changes(tiny_sources: Path) -> None:
    first = build_kernels()
    built_at = first.stat().st_mtime_ns
    assert build_kernels() == first
    assert first.stat().st_mtime_ns == built_at
    (tiny_sources / "two.c").write_text("int two(void) { return 3; }\n")
    assert build_kernels() != first


@needs_compiler
def test_failed_compilation_says_what_the_compiler_said(tiny_sources: Path) -> None:
    (tiny_sources / "two.c").write_text("not C\n")
    with pytest.raises(KernelsUnavailable, match=r"two\.c"):
        build_kernels()
    assert not list(Path(tiny_sources.parent / "home" / "kernels").iterdir())


def test_compiler_that_cannot_run_is_a_reason_not_a_crash(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tiny_sources.parent / "broken-cc"
    broken.write_text("no interpreter line")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(KernelsUnavailable, match="broken-cc"):
        build_kernels()


def test_no_compiler_is_a_reason_not_a_crash(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tiny_sources))
    with pytest.raises(KernelsUnavailable, match="no C compiler"):
        build_kernels()


def test_home_that_cannot_be_written_is_a_reason_not_a_crash(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tiny_sources.parent / "file"
    occupied.write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(occupied))
    with pytest.raises(KernelsUnavailable):
        build_kernels()
