"""A pytest plugin for runs on a GPU. It leaves out the CPU's parameters of tests that have both, which `make test` runs
without a GPU, and in a process of the compile pass it compiles kernels without launching them.
"""

from __future__ import annotations

import os

import pytest

SHARE = "PENSTOCK_COMPILE_SHARE"  # "2/14": this process compiles what the third of 14 shares of the tests launches
CHUNK = 8  # neighbours launch the same kernels, so that they go to one process


def pytest_configure() -> None:
    if SHARE in os.environ:
        _compile_without_launching()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if not _is_for_cpu(item)]
    if SHARE in os.environ:
        index, count = map(int, os.environ[SHARE].split("/"))
        kept = [item for number, item in enumerate(kept) if number // CHUNK % count == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_for_cpu(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and "cpu" in callspec.id.replace("_", "-").split("-")


def _compile_without_launching() -> None:
    from triton.runtime.jit import JITFunction

    compile_or_run = JITFunction.run

    def only_compile(self: object, *args: object, grid: object, warmup: bool, **options: object) -> object:
        return compile_or_run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = only_compile
