"""The `penstock` command."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from contextlib import suppress
from functools import cache

from penstock import __version__
from penstock.cli.command_parser import TopParser
from penstock.cli.commands import all_commands
from penstock.cli.logs import configure_logs
from penstock.core.crash_stacks import write_stacks_on_crash
from penstock.core.errors import PenstockError
from penstock.core.files import in_words
from penstock.link.parent_death import end_with_named_parent
from penstock.observe.redaction import redact


@cache  # parsing changes nothing in it
def parser() -> argparse.ArgumentParser:
    return TopParser(__version__)


def main(argv: list[str] | None = None) -> None:
    write_stacks_on_crash()
    end_with_named_parent()
    arguments = parser().parse_args(argv)
    configure_logs(getattr(arguments, "log_level", "info"))
    try:
        try:
            run(arguments)
        finally:
            sys.stdout.flush()
    except PenstockError as error:
        sys.exit(f"penstock: {redact(error.message)}")
    except BrokenPipeError:  # of `| head`, which has what it wants
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        logging.getLogger("penstock").debug("the command failed", exc_info=True)
        if error.filename is None:
            _drop_output()
        sys.exit(f"penstock: {redact(in_words(error))}")
    except KeyboardInterrupt:
        sys.exit(130)


def _drop_output() -> None:
    """Drop what standard output did not take, or Python would fail over it once more when it ends."""
    with suppress(OSError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: argparse.Namespace) -> None:
    (command,) = (command for command in all_commands() if command.name == arguments.command)
    command.load().run(arguments)


if __name__ == "__main__":
    main()
