"""The template process of these tests: engines are forked from it, and need not import torch each anew.

    subprocess.Popen([…, "penstock.cli.main", "engine", …], env=os.environ | forking())

A server that is started so is executed as ever; its engine and its ranks are the template's children and have sessions
of their own, as those of `penstock serve --replicas` have. `started_by` finds processes of either kind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from penstock.engine_process.spawn import TEMPLATE_VARIABLE, TemplateProcess
from tests.children import children

ENGINE, RANK = "penstock.engine_process", "penstock.engine_process.rank"


def forking() -> dict[str, str]:
    """Variables for a process whose engines are to be forked."""
    return {TEMPLATE_VARIABLE: _template()}


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Ranks that this process starts meanwhile are forked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TEMPLATE_VARIABLE, _template())
        yield


@cache
def _template() -> str:
    """The socket of the one that this process has, from here to its end."""
    from penstock.cli.replicas import template_modules

    with contextlib.ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        held.enter_context(TemplateProcess.start(template_modules(), directory))
        path = os.environ.pop(TEMPLATE_VARIABLE, "off")  # for those only that ask for it
        atexit.register(held.pop_all().close)
    return path


def engine_of(server: int) -> psutil.Process:
    (engine,) = started_by(server, ENGINE)
    return engine


def started_by(starter: int, word: str) -> list[psutil.Process]:
    """Processes with this word in their command that are the starter's children, or whose lifeline it holds. None where
    it has ended."""
    if not psutil.pid_exists(starter):
        return []
    own, held = {child.pid for child in children(starter, word)}, _pipes(starter)
    return [one for one in children(None, word) if one.pid in own or not held.isdisjoint(_pipes(one.pid))]


def _pipes(process: int) -> set[str]:
    """Those that it has open, but for its standard streams."""
    opened: dict[str, str] = {}
    with contextlib.suppress(OSError):  # it has ended
        opened = {link.name: os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
    return {name for number, name in opened.items() if name.startswith("pipe:") and int(number) > 2}
