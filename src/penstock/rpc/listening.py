"""Ports and TLS of gRPC servers. A certificate is read again at each handshake, as over HTTP (`http.tls`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from penstock.core.errors import ConfigError

Credentials = Any  # gRPC's, which come without types
KeyPair = tuple[bytes, bytes]  # private key and certificates, as PEM


def bind(server: Any, host: str, port: int, param: str, credentials: Credentials | None) -> int:
    """The port that it listens on. Raises ConfigError, about the setting `param`."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"cannot listen on {address}", param=param)
    return int(bound)


def credentials_of(cert_file: str, key_file: str | None, client_ca: str | None, param: str) -> Credentials:
    """`key_file`: None where the certificate's file has the key too; `client_ca`: clients must have a certificate of
    one of these CAs. Raises ConfigError, about the setting `param`."""
    read = _reader(Path(cert_file), Path(key_file or cert_file), None if client_ca is None else Path(client_ca))
    try:
        used = read()
    except OSError as error:
        raise ConfigError(f"cannot read the certificate: {error}", param=param) from None

    def fetch() -> Any:
        """Called at each handshake. A certificate that cannot be read leaves the last one in use."""
        nonlocal used
        try:
            found = read()
        except OSError:
            return None
        if found == used:
            return None
        used = found
        return _configuration(*found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(*used), fetch, require_client_authentication=client_ca is not None
    )


def _configuration(pair: KeyPair, roots: bytes | None) -> Any:
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


def _reader(cert: Path, key: Path, roots: Path | None) -> Callable[[], tuple[KeyPair, bytes | None]]:
    return lambda: ((key.read_bytes(), cert.read_bytes()), None if roots is None else roots.read_bytes())
