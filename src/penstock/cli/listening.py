"""Sockets that a gateway listens on, bound or told in words why not."""

from __future__ import annotations

import errno
import socket

from penstock.core.errors import ConfigError
from penstock.http.server import bound_socket


def listening_socket(host: str, port: int, param: str | None = None) -> socket.socket:
    """A socket bound to `host` and `port`; 0 picks a free one. Raises `ConfigError`, about `param` if it is named."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        hint = "; try --port 0" if error.errno == errno.EADDRINUSE and param is None else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}{hint}", param=param) from None
