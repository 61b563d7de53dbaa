"""How many other requests a replica had while it worked on one: what has to be alike before times are compared.

The number at the beginning does not tell: prompts that come later interrupt the answers of a busy replica, and of an
idle one nobody's. So it is the mean over the whole answer.
"""

from __future__ import annotations

from penstock.gateway.replicas.replica import Replica


class LoadMeter:
    """The load of one replica, from now on."""

    __slots__ = ("_began_s", "_flight_s", "_of_others", "_own", "_replica")

    def __init__(self, replica: Replica, sequences: int) -> None:
        """`sequences`: what is known to be there. What other gateways have of it is taken to stay."""
        self._replica = replica
        self._own = len(replica.in_flight)
        self._of_others = max(0, sequences - self._own)
        self._began_s = replica.upstream.clock.now()
        self._flight_s = replica.flight_s()

    def mean(self, *, is_counted: bool) -> int:
        """Requests at the replica, up to now. `is_counted`: the one that is measured is among the gateway's own, and is
        left out."""
        seconds = self._replica.upstream.clock.now() - self._began_s
        own = (self._replica.flight_s() - self._flight_s) / seconds - is_counted if seconds > 0.0 else self._own
        return round(max(own, 0.0) + self._of_others)
