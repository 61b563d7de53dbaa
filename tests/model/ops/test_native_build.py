"""The kernels are compiled once, by whoever comes first, and never left half-written."""

from __future__ import annotations

import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.private_files import is_safe_from_others
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


def test_compiler_that_says_nothing_or_takes_too_long_is_a_reason_of_one_line(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tiny_sources.parent / "cc"
    monkeypatch.setenv("CC", str(compiler))
    for script, reason in (("exit 3", "ended with status 3"), ("exec tail -f /dev/null", "took more than 0.1 s")):
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        with pytest.raises(KernelsUnavailable, match=reason) as failure:
            build_kernels()
        assert "\n" not in str(failure.value)
        monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.1)


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


@needs_compiler
def test_kernels_are_built_where_nobody_else_can_write(tiny_sources: Path) -> None:
    library = build_kernels()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (library, library.parent, library.parent.parent)} == {0o700}


@needs_compiler
@pytest.mark.parametrize("mode", [0o775, 0o707])
@pytest.mark.parametrize("is_directory", [True, False])
def test_a_library_that_others_could_have_written_is_built_again(
    tiny_sources: Path, mode: int, is_directory: bool
) -> None:
    library = build_kernels()
    library.write_bytes(b"planted")
    (library.parent if is_directory else library).chmod(mode)
    again = build_kernels()
    assert again == library
    assert again.read_bytes().startswith(b"\x7fELF")
    assert is_safe_from_others(again)


@needs_compiler
@pytest.mark.parametrize("is_directory", [True, False])
def test_a_library_of_another_user_is_not_loaded(
    tiny_sources: Path, is_directory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build_kernels()
    theirs = library.parent if is_directory else library
    real = Path.stat

    def owned_by_another(path: Path, **options: bool) -> Any:
        found = real(path, **options)
        return SimpleNamespace(st_uid=12345, st_mode=found.st_mode) if path == theirs else found

    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    for name, stand_in in (("stat", owned_by_another), ("chmod", refuse), ("unlink", refuse)):
        monkeypatch.setattr(Path, name, stand_in)
    with pytest.raises(KernelsUnavailable, match="another user could have written it"):
        build_kernels()
