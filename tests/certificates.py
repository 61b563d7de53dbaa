"""Certificates made at test time, by the `openssl` program: a CA, and what it vouches for."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """The context of a client that trusts this CA and no other."""
        return ssl.create_default_context(cafile=str(self.cert))

    def issue(self, name: str, days: int = 90, good_for: str = "DNS:localhost,IP:127.0.0.1") -> Certificate:
        """A certificate whose subject is `name`. One of the same name is written over."""
        found = Certificate(self.cert.parent / f"{name}.pem", self.cert.parent / f"{name}.key")
        by = ["-CA", str(self.cert), "-CAkey", str(self.key)]
        _make(found, name, days, *by, "-addext", f"subjectAltName={good_for}")
        return found


def new_ca(directory: Path, name: str = "ca") -> Certificate:
    found = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    _make(found, name, 3650)
    return found


def _make(found: Certificate, name: str, days: int, *more: str) -> None:
    files = ["-keyout", str(found.key), "-out", str(found.cert), "-days", str(days), "-subj", f"/CN={name}"]
    subprocess.run([*_NEW, *files, *more], check=True, capture_output=True)
