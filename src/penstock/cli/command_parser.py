"""Parsers of the command line on argparse: flags of a command are added when it is asked for, commands are listed
in groups, and errors are short and say what was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.cli.commands import GROUPS, Command, all_commands
from penstock.core.config import nearest, shown


class CommandParser(argparse.ArgumentParser):
    """Subcommands are of this class too: each complains of its own flags. With a `command` it is empty until its
    flags are needed."""

    def __init__(self, *, command: Command | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._command = command

    def _add_flags(self) -> None:
        if self._command is not None:
            self._command.load().add_flags(self)
            self._command = None

    def format_help(self) -> str:
        self._add_flags()
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._add_flags()
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
        """Exits without the usage, which of some commands fills a screen."""
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


class TopParser(CommandParser):
    """`penstock` itself, its commands in groups."""

    def __init__(self, version: str) -> None:
        super().__init__(prog="penstock", description="LLM serving, from the GPU up to the fleet.")
        self.add_argument("--version", action="version", version=f"penstock {version}")
        self._commands = self.add_subparsers(
            dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
        )
        for command in all_commands():
            self._commands.add_parser(command.name, help=command.help, command=command)

    def format_help(self) -> str:
        listed = {action.dest: action for action in self._commands._choices_actions}
        sections = {title: [listed[command.name] for command in group] for title, group in GROUPS.items()}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, actions in (sections | {"options": self._optionals._group_actions}).items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()
