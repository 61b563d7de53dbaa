"""Metrics of several processes in one exposition: each series has a label that names the process it comes from."""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[str, str], label: str) -> str:
    """`texts`: expositions of a `Registry`, by the label's value. The help and the type that come first are kept."""
    families: dict[str, list[str]] = {}
    for process, text in texts.items():
        family: list[str] = []
        is_new = False
        for line in text.split("\n"):  # not splitlines: a label's value may hold what Python takes for an end of line
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if line.startswith("#"):
                if is_new:
                    family.append(line)
            elif line:
                family.append(_labelled(line, f'{label}="{process}"'))
    return "\n".join([line for family in families.values() for line in family] + [""])


def _labelled(line: str, pair: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{pair},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{pair}}} {value}"
