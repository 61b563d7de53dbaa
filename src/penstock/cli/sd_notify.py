"""Tells systemd how a service is doing (sd_notify): a datagram to the socket that it names; without one, nothing."""

from __future__ import annotations

import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """A service that cannot be heard goes on all the same."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
        except OSError:
            return
