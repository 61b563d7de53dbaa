"""A pytest plugin for runs on a GPU. It leaves out tests and parameters that `make test` runs without one, and in a
process of the compile pass it compiles kernels without launching them.
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
    kept = [item for item in items if _needs_gpu(item)]
    if SHARE in os.environ:
        index, count = map(int, os.environ[SHARE].split("/"))
        kept = [item for number, item in enumerate(kept) if number // CHUNK % count == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _needs_gpu(item: pytest.Item) -> bool:
    """A file whose name says so is for a GPU but for its CPU parameters; of other files, only what says so itself."""
    callspec = getattr(item, "callspec", None)
    words = callspec.id.replace("_", "-").split("-") if callspec is not None else []
    if item.path.name.startswith(("test_triton", "test_cuda", "test_gpu")):
        return "cpu" not in words
    reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
    return "cuda" in words or any("GPU" in reason or "CUDA" in reason for reason in reasons)


def _compile_without_launching() -> None:
    import torch
    from triton.runtime.jit import JITFunction

    compile_or_run = JITFunction.run

    def only_compile(self: object, *args: object, grid: object, warmup: bool, **options: object) -> object:
        return compile_or_run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = only_compile
    torch.testing.assert_close = lambda *tensors, **options: None
