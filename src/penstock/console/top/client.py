"""A console's feed and alerts, read over HTTP."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from penstock.api.model_order import MODELS_PATH
from penstock.console.top.view import AlertLine, Hello, SharedModels, Tick, View
from penstock.core.errors import ConfigError, EngineUnavailable, PenstockError, PermissionDenied, Unauthenticated

_TIMEOUT_S = 10.0
_FEED, _ALERTS = "/console/v1/feed", "/admin/v1/alerts"
_shared_models_decoder = msgspec.json.Decoder(SharedModels)
_hello_decoder = msgspec.json.Decoder(Hello)
_tick_decoder = msgspec.json.Decoder(Tick)


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
        """Returns how things stand now."""
        for view in self.events():
            self.complete(view)
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
                    view = View(self.url, _hello_decoder.decode(data))
                elif kind == "tick" and view is not None:
                    view.take(_tick_decoder.decode(data))
                if view is not None:
                    yield view

    def alerts(self) -> list[AlertLine] | None:
        """None: nobody watches here."""
        connection = self._open()
        with contextlib.closing(connection):
            try:
                answer = self._ask(connection, _ALERTS)
                return _alerts_decoder.decode(answer.read()).alerts
            except PenstockError:
                return None

    def complete(self, view: View) -> None:
        """Adds what the feed does not tell."""
        view.alerts, view.shared = self.alerts(), self.shared_models()

    def shared_models(self) -> SharedModels | None:
        """None: no models share a device there."""
        connection = self._open()
        with contextlib.closing(connection):
            try:
                found = _shared_models_decoder.decode(self._ask(connection, MODELS_PATH).read())
            except PenstockError:
                return None
        return found if found.models else None

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


_alerts_decoder = msgspec.json.Decoder(_Alerts)


class _Error(msgspec.Struct):
    message: str = ""


class _Refused(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


_refused_decoder = msgspec.json.Decoder(_Refused)


def _refusal(answer: http.client.HTTPResponse, url: str) -> PenstockError:
    try:
        said = _refused_decoder.decode(answer.read()).error.message
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
