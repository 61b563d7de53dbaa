from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """At every call of a function Triton's interpreter looks for builtins in all of the language, to put its own in
    their place: here it looks once."""
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):  # and not its own already
                interpreter._patch_attr(package, name, member, builder, scope)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield
