"""Triton's interpreter, quicker: half of what it does is to find out again what it knew.

At every call of a function it looks for builtins in all of the language, to put its own in their place; each value
makes its shape anew, and looks its type up in a table that is made for it. A test file, or the conftest.py of a
package, imports the fixture.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import has_gpu


@pytest.fixture(scope="package", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if has_gpu():  # where kernels are compiled
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        patch.setattr(interpreter, "_patch_lang", once_at_a_time(interpreter._patch_lang))
        patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", block_types())
        patch.setattr(core.tensor, "__init__", tensors())
        yield


@cache
def builtins_of(package: Any) -> list[str]:
    from triton.language import core

    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    from triton.language import core
    from triton.runtime import interpreter

    for name in builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # and not the interpreter's own already
            interpreter._patch_attr(package, name, member, builder, scope)


def once_at_a_time(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The whole language is patched from the launch of a kernel to its end, and not anew for each function below."""
    from triton import language
    from triton.language import core
    from triton.runtime.interpreter import _LangPatchScope

    everything = SimpleNamespace(__globals__={"tl": language, "core": core})
    active: list[Any] = []

    class Outermost(_LangPatchScope):
        def restore(self) -> None:
            active.pop().restore()

    def patch(_function: Any) -> Any:
        if active:
            return _LangPatchScope()
        active.append(patch_lang(everything))
        return Outermost()

    return patch


def by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from triton.language import core

    known: dict[str, Any] = {}

    def found(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if element.name not in known:
            known[element.name] = np_dtype(element)
        return known[element.name]

    return found


def block_types() -> Callable[[Any, Any, Any], None]:
    """Initializes a type of blocks. Shapes are looked at once each."""
    from triton._utils import validate_block_shape
    from triton.language import core

    constexpr = core.constexpr

    @cache
    def known(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        return shape, validate_block_shape(shape), str(shape)

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        listed = shape.value if isinstance(shape, constexpr) else shape
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in listed])
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, text = known(sizes)
        self.name = f"<{text}, {element_ty}>"

    return init


def tensors() -> Callable[[Any, Any, Any], None]:
    """Initializes a value. Those of one shape share it."""
    from triton.language import core

    @cache
    def known(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = known(tuple(type.shape.values) if type.is_block() else ())

    return init
