"""What `penstock top` does: it follows a console's feed over HTTP and draws it, as `console.screen` has it."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from penstock.console.screen import AlertLine, Hello, Tick, View, lines
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError, PermissionDenied, Unauthenticated

_TIMEOUT_S = 10.0
_AGAIN_S = 1.0
_FEED, _ALERTS = "/console/v1/feed", "/admin/v1/alerts"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor


def show(url: str, key: str | None, *, once: bool) -> None:
    source = Source(url, key)
    if once:
        print("\n".join(lines(source.look(), width=shutil.get_terminal_size((80, 24)).columns)))
    elif not sys.stdout.isatty():
        raise ConfigError("this is no terminal: penstock top --once prints how things stand and ends")
    else:
        _follow(source)


class Source:
    """A gateway's, or a replica's, console over HTTP."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"'{url}' is no address: http://host:port", param="url")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._open: Callable[[], http.client.HTTPConnection] = lambda: kind(parts.netloc, timeout=_TIMEOUT_S)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def look(self) -> View:
        """How things stand now."""
        for view in self.events():
            view.alerts = self.alerts()
            return view
        raise EngineUnavailable(f"{self.url} ended the connection")

    def events(self) -> Iterator[View]:
        """The view, as often as it changes, until the connection ends."""
        connection = self._open()
        with contextlib.closing(connection):
            answer = self._ask(connection, _FEED)
            view: View | None = None
            for kind, data in _events(answer):
                if kind == "hello":
                    view = View(self.url, msgspec.json.decode(data, type=Hello))
                elif kind == "tick" and view is not None:
                    view.take(msgspec.json.decode(data, type=Tick))
                if view is not None:
                    yield view

    def alerts(self) -> list[AlertLine] | None:
        """None: nobody watches here."""
        connection = self._open()
        with contextlib.closing(connection):
            try:
                answer = self._ask(connection, _ALERTS)
                return msgspec.json.decode(answer.read(), type=_Alerts).alerts
            except PenstockError:
                return None

    def _ask(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnavailable(f"nobody answers at {self.url}: {error}") from None
        if answer.status != 200:
            raise _refusal(answer, self.url)
        return answer


class _Alerts(msgspec.Struct):
    alerts: list[AlertLine] = []


class _Error(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


def _refusal(answer: http.client.HTTPResponse, url: str) -> PenstockError:
    try:
        said = msgspec.json.decode(answer.read(), type=_Refused).error.message
    except (msgspec.DecodeError, OSError):
        said = ""
    kinds: dict[int, type[PenstockError]] = {401: Unauthenticated, 403: PermissionDenied}
    if answer.status in kinds:
        return kinds[answer.status](f"{said} (--key, or $PENSTOCK_ADMIN_KEY)")
    if answer.status == 404:
        hint = "is it a gateway whose admin API is on a port of its own (admin_port), or an engine behind one?"
        return ConfigError(f"{url} has no console: {hint}", param="url")
    return EngineUnavailable(f"{url} answered {answer.status}: {said}")


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
    kind = ""
    try:
        while line := answer.readline():
            name, _, value = line.rstrip(b"\r\n").partition(b": ")
            if name == b"event":
                kind = value.decode(errors="replace")
            elif name == b"data":
                yield kind, value
    except (OSError, http.client.HTTPException):
        return


# -- a screen that goes on


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
                    view.alerts = self._source.alerts()
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
    with _screen():
        _draw(view)
        size = shutil.get_terminal_size()
        while not _wants_to_leave():
            is_new = False
            with contextlib.suppress(queue.Empty):
                while True:
                    view, is_new = news.views.get_nowait(), True
            before, size = size, shutil.get_terminal_size()
            if is_new or size != before:
                _draw(view)


def _draw(view: View) -> None:
    size = shutil.get_terminal_size((80, 24))
    has_colour = "NO_COLOR" not in os.environ
    shown = lines(view, width=size.columns, has_colour=has_colour)[: size.lines - 1]
    text = "".join(f"{line}\x1b[K\n" for line in shown)
    sys.stdout.write(f"\x1b[H{text}\x1b[J")
    sys.stdout.flush()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """A screen of its own, and keys as they are pressed; as it was again at the end."""
    import termios
    import tty

    is_keyed = sys.stdin.isatty()
    before = termios.tcgetattr(sys.stdin) if is_keyed else None
    sys.stdout.write(_ENTER)
    try:
        if is_keyed:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _wants_to_leave(wait_s: float = 0.25) -> bool:
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x1b")
