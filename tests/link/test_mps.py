from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.link.mps import start_mps

VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set here goes with the test."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != VARIABLE})


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    directory = tmp_path / "pipes"
    directory.mkdir()
    return directory


def install_fake(tmp_path: Path, script: str) -> None:
    """A fake of NVIDIA's program, first on the path."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"


def test_engines_that_start_later_find_a_daemon_that_was_started(tmp_path: Path, pipes: Path) -> None:
    install_fake(tmp_path, f'touch "${VARIABLE}/control"; exec cat')
    assert start_mps(pipes)
    assert os.environ[VARIABLE] == str(pipes)


def test_there_is_none_where_it_is_not_installed(tmp_path: Path, pipes: Path) -> None:
    os.environ["PATH"] = str(tmp_path)
    assert not start_mps(pipes)
    assert VARIABLE not in os.environ


def test_a_daemon_that_ends_at_once_leaves_engines_in_turns(tmp_path: Path, pipes: Path) -> None:
    install_fake(tmp_path, "exit 1")
    assert not start_mps(pipes)
    assert VARIABLE not in os.environ


def test_an_operators_daemon_is_used(pipes: Path) -> None:
    os.environ[VARIABLE] = "/somewhere"
    assert start_mps(pipes)
    assert os.environ[VARIABLE] == "/somewhere"
    assert not any(pipes.iterdir())
