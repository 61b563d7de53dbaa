"""Findings of a check: one line for a person, and the same for a program."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True):
    name: str
    verdict: Literal["ok", "warn", "fail"]
    says: str
    hint: str = ""  # what to do about it


def ok(name: str, says: str) -> Finding:
    return Finding(name, "ok", says)


def warn(name: str, says: str, hint: str) -> Finding:
    return Finding(name, "warn", says, hint)


def fail(name: str, says: str, hint: str = "") -> Finding:
    return Finding(name, "fail", says, hint)
