"""What the SDKs speak HTTP with, in tests: servers that have no certificate, so nobody's certificates are read. That
takes 20 ms of each client."""

from __future__ import annotations

import contextlib

import openai


class Unverified(openai.DefaultHttpxClient):
    def __init__(self) -> None:
        super().__init__(verify=False)

    def __del__(self) -> None:
        """As the SDKs' own."""
        with contextlib.suppress(Exception):
            self.close()
