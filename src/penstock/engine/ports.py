"""Connections of the engine: where requests come from and news go, where guided ones get guides, and the memory
that it can give back."""

from __future__ import annotations

from typing import Protocol

from penstock.core.parking import MemoryChange
from penstock.core.request import Request
from penstock.engine.messages import FromEngine, ToEngine
from penstock.sched.guiding import TokenGuide


class MailboxPort(Protocol):
    """Port by which requests come in and news go out: a socket's mailbox, or anything like it."""

    def receive(self, *, wait: bool) -> list[ToEngine]: ...

    def send(self, message: FromEngine) -> None: ...


class Guides(Protocol):
    """Guides of guided requests, which keep them to their rules."""

    @property
    def waited_s(self) -> float:
        """Seconds that the loop has waited for masks."""

    def open(self, request: Request) -> TokenGuide: ...

    def go(self) -> None:
        """Begin with the masks that the last tokens call for."""

    def wait(self, timeout_s: float) -> None:
        """Waits until one of them may have become ready."""


class DeviceMemory(Protocol):
    """Memory of weights and KV cache, for an engine that can be parked. Either call is done when it returns, or changes
    nothing and raises a `PenstockError`."""

    def park(self) -> MemoryChange:
        """Give it back. The cache's content is lost; weights and adapters are kept in host memory."""

    def wake(self) -> MemoryChange:
        """Take it again, at the same addresses."""
