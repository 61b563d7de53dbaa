"""A stand-in for SGLang's package of kernels, not built for CPUs: its names may be imported, and not called.

`install.py` puts it beside SGLang. Servers on a CPU compute with torch, and import these all the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

__path__: list[str] = []  # a package: any module may be in it


class _Name(type):
    def __call__(cls, *args: object, **options: object) -> Any:
        raise NotImplementedError(f"sgl_kernel's {cls.__name__} runs on GPUs only")

    def __getattr__(cls, name: str) -> Any:
        return _name(name)


def _name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {})


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return _name(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    return _name(name)
