"""Messages between a server and the process that tries guides for it; msgpack in frames."""

from __future__ import annotations

import msgspec

from penstock.core.guide import Guide


class Model(msgspec.Struct, frozen=True):
    text: bytes  # an encoded ModelText
    eos_ids: list[int]


class Trial(msgspec.Struct, frozen=True):
    number: int
    guide: Guide


class Verdict(msgspec.Struct, frozen=True):
    number: int
    guide: Guide | None = None  # as the engine is to have it; None: it is refused
    problem: str = ""
    is_unsupported: bool = False
