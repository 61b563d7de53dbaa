"""A pytest plugin for runs on a GPU. It leaves out tests and parameters that `make test` runs without one, and in a
process of the compile pass it compiles kernels without launching them.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import pytest

SHARE = "PENSTOCK_COMPILE_SHARE"  # "2/14": this process compiles what the third of 14 shares of the tests launches
CHUNK = 8  # neighbours launch the same kernels, so that they go to one process


def pytest_configure() -> None:
    if SHARE in os.environ:
        sys.meta_path.insert(0, WithoutAssertions())
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


class WithoutAssertions:
    """Imports tests whose assertions assert nothing. What an assertion says is computed all the same: launches are in
    there, and so are those of the lines behind one that would fail."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name.startswith("tests.") else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def path_stats(self, path: str) -> Any:
        raise OSError("nothing is compiled ahead, or the next run would import these in place of the tests")

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:
        return compile(_Transformer().visit(ast.parse(data)), path, "exec", dont_inherit=True)


class _Transformer(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)
