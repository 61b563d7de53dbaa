"""A pytest plugin for runs with several workers: xdist hands out files, and only the worker that got one imports it.

Without it every worker imports every file and collects every test before the first one runs. In a worker each file is
one item, which collects its tests when it is its turn and runs them; what is reported are the tests. `tools/suite.py`
turns it on with `-p tests.by_file`. Expressions of markers and keywords hold; node ids of single tests do not.

The longest files are handed out first, so that at the end nobody waits for one of them. Files that need torch go to two
workers for as long as another one has something else to do: with transformers it takes seconds to import, and a single
worker would be the last to end. At the end no other worker imports it for the few files that are left. Files that need
Anthropic's SDK go to the other worker.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from xdist.scheduler import LoadScheduling

from tests.collecting import SEEDED
from tests.reporting import read_budgets

_TORCH = re.compile(
    r"\b(torch|transformers|triton|tests\.(model|quant|runner|equality|hub)|penstock\.(model|quant|engine_process))\b"
)
_ANTHROPIC = re.compile(r"^(import|from) anthropic\b", re.MULTILINE)
_OWN = ("torch", "anthropic", "torch")  # what the first workers import
FEW_FILES = 20  # of fast tests: together they take as long as torch and transformers take to import


class TestFile(pytest.Item):
    """The tests of a file, before they are collected."""

    __test__ = False

    def runtest(self) -> None:
        raise AssertionError("its tests are run, and not itself")

    def collected(self) -> list[pytest.Item]:
        assert self.parent is not None
        module = pytest.Module.from_parent(self.parent, path=self.path)
        gc.collect()  # of what earlier tests left; the rest is frozen
        gc.disable()  # imports make objects that stay
        try:
            items = list(self.session.genitems(module))
        finally:
            gc.freeze()
            gc.enable()
        self.config.hook.pytest_collection_modifyitems(session=self.session, config=self.config, items=items)
        return items

    def run_all(self, nextitem: pytest.Item | None) -> None:
        place = self.session.items.index(self)
        items = self.collected()
        for item, follower in zip(items, [*items[1:], nextitem], strict=False):
            self.session.items[place] = item  # where xdist looks up what it reports
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=follower)
            if self.session.shouldfail or self.session.shouldstop:
                break
        if not items:  # the file before left standing what this one might have used
            self.session._setupstate.teardown_exact(nextitem)
        self.session.items[place] = self


class _Worker:
    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Files have no markers: an expression leaves out none of them."""
        files = [item for item in items if isinstance(item, TestFile)]
        items[:] = [item for item in items if not isinstance(item, TestFile)]
        yield
        seconds = read_budgets().get("seconds", {})
        items += sorted(files, key=lambda file: -seconds.get(file.nodeid, 0.0))

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Item:
        nodeid = module_path.relative_to(parent.config.rootpath).as_posix()
        return TestFile.from_parent(parent, name=module_path.name, path=module_path, nodeid=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        if isinstance(item, TestFile):
            item.run_all(nextitem)
        else:
            for report in in_one(runtestprotocol(item, log=False, nextitem=nextitem)):
                item.ihook.pytest_runtest_logreport(report=report)
        return True


def in_one(reports: list[pytest.TestReport]) -> list[pytest.TestReport]:
    """One report of a test that passed instead of three: to send them takes as long as a small test."""
    if not all(report.passed for report in reports):
        return reports
    _, call, teardown = reports
    call.duration = sum(report.duration for report in reports)
    call.user_properties = teardown.user_properties
    return [call]


class FileScheduling(LoadScheduling):
    """Files that need what this worker imports, then those that need nothing, then the others'."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._with_torch: set[Any] = set()  # workers that have imported it
        self._num_few = FEW_FILES if config.option.markexpr == "not slow" else 0

    def _send_tests(self, node: Any, num: int) -> None:
        own = dict(zip(self.nodes, _OWN, strict=False)).get(node)

        def order(index: int) -> tuple[int, int]:
            needed = self._needed(index)
            return 0 if needed == own else 1 if needed is None else 2, index

        self.pending.sort(key=order)
        if self.pending and self._is_torch_for_few(node):
            node.shutdown()
            return
        self._with_torch |= {node for index in self.pending[:num] if self._needed(index) == "torch"}
        super()._send_tests(node, num)

    def _is_torch_for_few(self, node: Any) -> bool:
        """Whether only files that need torch are left, which another worker has imported, and so few that this worker
        would import it for as long as they take."""
        is_first = not self.node2pending[
            node
        ]  # a worker begins only when it knows what comes next, or that nothing does
        if is_first or node in self._with_torch or self._with_torch.isdisjoint(self.nodes):
            return False
        return len(self.pending) < self._num_few and all(self._needed(index) == "torch" for index in self.pending)

    def _needed(self, index: int) -> str | None:
        assert self.collection is not None
        return long_import(self.config.rootpath / self.collection[index])


@cache
def long_import(path: Path) -> str | None:
    """The package that a file needs and that takes long to import, going by its text and the conftest.py above it."""
    text = path.read_text()
    if _TORCH.search(text) or _is_seeded(path.parent):
        return "torch"
    return "anthropic" if _ANTHROPIC.search(text) else None


@cache
def _is_seeded(directory: Path) -> bool:
    own = directory / "conftest.py"
    if own.exists() and SEEDED in own.read_text():
        return True
    return (directory / "__init__.py").exists() and _is_seeded(directory.parent)


class _Controller:
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> FileScheduling:
        return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Worker() if hasattr(config, "workerinput") else _Controller())
