"""Orders of rollouts, from the store's follower to the gateway, and the wiring of what it measures to its writer.

Belongs to the event loop's thread. Orders may come before there is a gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.core.rollout import RolloutOrder
from penstock.gateway.app import Gateway
from penstock.gateway.rollouts.writer import RolloutWriter


class RolloutBoard:
    def __init__(self) -> None:
        self._orders: tuple[RolloutOrder, ...] = ()
        self._changed: Callable[[Iterable[RolloutOrder]], object] = lambda orders: None

    def apply(self, orders: Iterable[RolloutOrder]) -> None:
        """All rollouts that are on."""
        self._orders = tuple(orders)
        self._changed(self._orders)

    def follow(self, gateway: Gateway, writer: RolloutWriter) -> None:
        """From now on the gateway measures for these orders, and the writer keeps what it measures."""
        gateway.rollouts.sink, gateway.feedback = writer, writer.say
        gateway.recorder.rollout_lost = writer.lost.counts

        def changed(orders: Iterable[RolloutOrder]) -> None:
            gateway.follow(orders)
            writer.follow(gateway.rollouts.orders)

        self._changed = changed
        if self._orders:
            changed(self._orders)
