"""TLS on both sides of the gateway: certificates that are read again while it serves, handshakes that are bounded in
time and counted, and the contexts of connections to replicas. TLS 1.2 is the least, and HTTP/1.1 is all that is
spoken."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.http.clock import TimerClock

log = logging.getLogger(__name__)

_ALPN = ["http/1.1"]
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SHORTAGE_S = 1.0  # a process that is out of descriptors is asked again after this long
_BACKLOG = 4096
_ACCEPT_AT_ONCE = 64
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


class ServerTls:
    """The certificate of a listening side. A renewed one is used from the next handshake on: its files are looked at
    then, and `reload` reads them at once. Connections go on."""

    def __init__(self, cert_file: str, key_file: str | None, client_ca: str | None = None) -> None:
        """`key_file`: None where the certificate's file has the key too; `client_ca`: clients must have one of
        these CAs. Raises `ConfigError` if something cannot be used."""
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca = client_ca
        self._seen = self._signature()
        self.context, self.expires_at = self._read()
        self._current = self.context
        self.renewed: Callable[[], None] = lambda: None  # called when `expires_at` has changed
        self.context.sni_callback = self._choose  # called whether a client names a server or not

    def reload(self) -> None:
        """Reads the files again, all or nothing: where they cannot be used the old certificate stays."""
        self._seen = self._signature()
        self._current, self.expires_at = self._read()
        self.renewed()

    def _read(self) -> tuple[ssl.SSLContext, float]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # a client could make us work for hours by it
        context.set_alpn_protocols(_ALPN)
        _load(context, self._cert_file, self._key_file, "tls_cert")
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as error:
                message = f"cannot use the CA certificates in {self._client_ca}: {error}"
                raise ConfigError(message, param="client_ca") from None
        return context, expiry(self._cert_file)

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        if self._signature() != self._seen:
            try:
                self.reload()
            except ConfigError as error:  # half of a pair may be written so far: the other half is a change, too
                log.error("the certificate stays as it is: %s", error.message)
        connection.context = self._current

    def _signature(self) -> tuple[object, ...]:
        """Versions of the files, as their directories tell; Kubernetes replaces a Secret's at once."""
        found: list[object] = []
        for name in filter(None, (self._cert_file, self._key_file, self._client_ca)):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                found.append((name, status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def client_context(
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
) -> ssl.SSLContext:
    """TLS for connections to replicas, whose certificates must be good for their names; None: by the system's CAs.
    Raises `ConfigError`."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the CA certificates in {ca_file}: {error}", param="ca_file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    if cert_file is not None:
        _load(context, cert_file, key_file, "client_cert")
    return context


def expiry(cert_file: str) -> float:
    """The time, as Unix counts it, at which the first of the certificates in a PEM file ends."""
    try:
        blocks = Path(cert_file).read_text().split(_BEGIN)[1:]
        return min(_not_after(ssl.PEM_cert_to_DER_cert(_BEGIN + one.partition(_END)[0] + _END)) for one in blocks)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot read the certificate in {cert_file}: {error}", param="tls_cert") from None


def _load(context: ssl.SSLContext, cert_file: str, key_file: str | None, param: str) -> None:
    def no_password() -> str:
        raise ConfigError(f"the key in {key_file or cert_file} has a password; none can be given", param=param)

    try:
        context.load_cert_chain(cert_file, key_file, no_password)
    except (OSError, ssl.SSLError) as error:
        files = cert_file if key_file is None else f"{cert_file} with the key {key_file}"
        raise ConfigError(f"cannot use the certificate {files}: {error}", param=param) from None


def _not_after(der: bytes) -> float:
    """`notAfter` of an X.509 certificate, which is a sequence of a sequence: version, serial number, algorithm, issuer,
    validity, …"""
    _, start, _ = _element(der, 0)
    _, at, _ = _element(der, start)
    tag, _, end = _element(der, at)
    if tag == 0xA0:  # the version may be left out
        at = end
    for _ in range(3):
        _, _, at = _element(der, at)
    _, start, _ = _element(der, at)  # validity
    _, _, at = _element(der, start)  # not before
    tag, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    if tag == 0x17:  # UTCTime, up to 2049
        text = ("19" if text[0] >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start and end of the value of the element there."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        num_bytes = length & 0x7F
        length = int.from_bytes(der[start : start + num_bytes], "big")
        start += num_bytes
    return tag, start, start + length


class TlsListener:
    """Accepts, and says so before the handshake: one that a client never ends takes a place as well."""

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None], clock: TimerClock) -> None:
        self._sock = sock
        self._accepted = accepted
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                client, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                self._loop.remove_reader(self._sock.fileno())
                self._clock.call_later(_SHORTAGE_S, self._resume)
                return
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted(client)
