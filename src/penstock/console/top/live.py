"""The screen of `penstock top`: drawn again with each tick of the feed, until q is pressed."""

from __future__ import annotations

import contextlib
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from penstock.console.top.client import Source
from penstock.console.top.screen import screen, text
from penstock.console.top.view import View
from penstock.core.errors import ConfigError, PenstockError

_AGAIN_S = 1.0


def show(url: str, key: str | None, *, once: bool) -> None:
    source = Source(url, key)
    if once:
        print(text(source.look(), width=Console().width))
    elif not sys.stdout.isatty():
        raise ConfigError("this is no terminal: penstock top --once prints how things stand and ends")
    else:
        _follow(source)


class _News(threading.Thread):
    """Follows the source in a thread, and again when it is lost."""

    def __init__(self, source: Source, view: View) -> None:
        super().__init__(name="top", daemon=True)
        self._source = source
        self.views: queue.Queue[View] = queue.Queue(maxsize=4)
        self._last = view

    def run(self) -> None:
        while True:
            try:
                for view in self._source.events():
                    self._source.complete(view)
                    self._last = view
                    self.views.put(view)
                self._last.trouble = f"{self._source.url} ended the connection; trying again"
            except PenstockError as error:
                self._last.trouble = error.message
            self.views.put(self._last)
            time.sleep(_AGAIN_S)


def _follow(source: Source) -> None:
    view = source.look()  # what is wrong from the start is said as an error
    news = _News(source, view)
    news.start()
    console = Console(markup=False, highlight=False, emoji=False)
    with _keys(), Live(screen(view, console.width), console=console, screen=True, auto_refresh=False) as live:
        size = console.size
        while not _is_q_pressed():
            is_new = False
            with contextlib.suppress(queue.Empty):
                while True:
                    view, is_new = news.views.get_nowait(), True
            if is_new or console.size != size:
                size = console.size
                live.update(screen(view, size.width), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Keys are read as they are pressed; the terminal is as it was again at the end."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_q_pressed(wait_s: float = 0.25) -> bool:
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x1b")
