"""Tables of text: columns as wide as they must be, two spaces between them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_UNBOUNDED = 100_000  # columns of what is no terminal: a line is never wrapped or cut there


def aligned(rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Plain lines, one for each row; the columns `left` begin at the left, the others end at the right."""
    from rich.console import Console

    found = list(rows)
    text = StringIO()
    console = Console(file=text, width=_UNBOUNDED, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(_table(None, found, left))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table to standard output; columns of numbers end at the right. A terminal has the head in bold, and cells are
    folded where it is too narrow."""
    left = {index for index in range(len(head)) if not all(_looks_like_number(row[index]) for row in rows)}
    if not sys.stdout.isatty():
        print(*aligned([head, *rows], left=left), sep="\n")
        return
    from rich.console import Console

    Console(markup=False, highlight=False, emoji=False).print(_table(head, rows, left))


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]], left: Collection[int]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=head is not None, header_style="bold")
    for index, title in enumerate(head if head is not None else rows[0]):
        table.add_column(title, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _looks_like_number(cell: str) -> bool:
    return cell in ("", "-") or cell.replace(",", "").replace(".", "").isdecimal()
