"""The way in to a WebSocket (RFC 6455, section 4): what the upgrade must say, subprotocols, and a key among them.

A browser can give no headers of its own, so a page offers its key as a subprotocol: `penstock.v1, bearer.KEY`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error
from collections.abc import Mapping
from hashlib import sha1
from typing import NamedTuple

from penstock.core.errors import InvalidRequest, UpgradeRequired

PROTOCOL = "penstock.v1"
_KEYS = ("bearer.", "openai-insecure-api-key.")  # the second as pages that use OpenAI's realtime API offer it
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_OFFERED = 16


class Offer(NamedTuple):
    protocol: str | None  # the one that is chosen; None: the client names none
    key: str | None  # an API key among the subprotocols


def check(headers: Mapping[bytes, bytes]) -> None:
    """Raises what is wrong with a request for an upgrade."""
    if headers.get(b"sec-websocket-version", b"").strip() != b"13":
        raise UpgradeRequired("this is version 13 of WebSocket", param="sec-websocket-version")
    try:
        is_nonce = len(b64decode(headers.get(b"sec-websocket-key", b"").strip(), validate=True)) == 16
    except (Error, ValueError):
        is_nonce = False
    if not is_nonce:
        raise InvalidRequest("sec-websocket-key: expected 16 bytes in base64", param="sec-websocket-key")


def read_offer(headers: Mapping[bytes, bytes]) -> Offer:
    """Raises InvalidRequest for a client that speaks other subprotocols only."""
    said = headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    offered = [name.strip() for name in said.split(",", _MAX_OFFERED) if name.strip()]
    key = next((name.removeprefix(one) for name in offered for one in _KEYS if name.startswith(one)), None)
    names = [name for name in offered if not name.startswith(_KEYS)]
    if names and PROTOCOL not in names:
        raise InvalidRequest(
            f"sec-websocket-protocol: this server speaks {PROTOCOL}; a key is offered beside it as bearer.KEY",
            param="sec-websocket-protocol",
        )
    return Offer(PROTOCOL if names else None, key)


def answer(headers: Mapping[bytes, bytes], protocol: str | None) -> bytes:
    """Header lines of the answer that changes protocols."""
    key = headers[b"sec-websocket-key"].strip()
    lines = b"sec-websocket-accept: %b\r\n" % b64encode(sha1(key + _GUID, usedforsecurity=False).digest())
    return lines + (b"sec-websocket-protocol: %b\r\n" % protocol.encode() if protocol is not None else b"")
