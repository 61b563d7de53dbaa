"""The SDKs' HTTP client in tests: servers have no certificate there, so nobody's certificates are read. Reading
them takes 20 ms of each client."""

from __future__ import annotations

import contextlib

import openai


class Unverified(openai.DefaultHttpxClient):
    def __init__(self) -> None:
        super().__init__(verify=False)

    def __del__(self) -> None:
        """Closes the client, as the SDKs' own do."""
        with contextlib.suppress(Exception):
            self.close()
