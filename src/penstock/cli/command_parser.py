"""An argparse parser whose errors are short and say what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.core.config import nearest, shown


class CommandParser(argparse.ArgumentParser):
    """Subcommands are of this class too: each complains of its own flags."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._complaint(unknown[0]))
        return found, []

    def _complaint(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {shown(word)!r}"
        name = word.partition("=")[0]
        hint = nearest(name, self._option_string_actions)
        return f"unknown flag {shown(name)}" + (f"; did you mean {hint}?" if hint else "")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        hint = nearest(str(value), known)
        said = f"{shown(str(value))!r}; " + (f"did you mean {hint!r}?" if hint else f"choose from {', '.join(known)}")
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"unknown command {said}")
        raise argparse.ArgumentError(action, f"unknown choice {said}")

    def error(self, message: str) -> NoReturn:
        """Without the usage, which of some commands fills a screen."""
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")
