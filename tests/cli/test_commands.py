"""The table of commands: each has flags, and only the module of the command that is asked for is imported."""

import subprocess
import sys

import pytest

from penstock.cli.commands import GROUPS, Command, all_commands
from penstock.cli.main import parser

_IMPORTED = """
import contextlib, io, sys
from penstock.cli.main import parser
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    parser().parse_args(sys.argv[1:])
print(*sys.modules)
"""


def imported(*words: str) -> set[str]:
    ended = subprocess.run([sys.executable, "-c", _IMPORTED, *words], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize("command", list(all_commands()), ids=lambda command: command.name)
def test_each_command_has_flags_and_is_run(command: Command) -> None:
    module = command.load()
    assert callable(module.add_flags)
    assert callable(module.run)


def test_help_lists_every_command_once_under_its_group() -> None:
    text = parser().format_help()
    for title, group in GROUPS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        shown = [line.split()[0] for line in section.splitlines() if line[2] != " "]
        assert shown == [command.name for command in group]


def test_help_imports_no_command() -> None:
    commands = {f"penstock.cli.{command.module}" for command in all_commands()}
    assert imported("--help") & commands == set()
    assert imported("serve", "--help") & commands == {"penstock.cli.serve_command"}
    heavy = {"torch", "numpy", "penstock.gateway", "penstock.http", "penstock.hub", "penstock.engine"}
    for command in ("serve", "engine", "gateway"):
        assert imported(command, "--help") & heavy == set()
