"""The hot path and nothing else: a gateway that forwards to its upstreams in turn. For tests and for measuring.

`python -m tests.http.bare_gateway PORT UPSTREAM_PORT …`
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from itertools import cycle

import uvloop

from penstock.core.errors import EngineUnavailable
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.exchange import Exchange
from penstock.http.forward import End, Outcome, forward
from penstock.http.limits import ClientLimits
from penstock.http.message import JSON
from penstock.http.server import Server, bound_socket
from penstock.http.upstream import Upstream


class BareGateway:
    def __init__(
        self, upstreams: Sequence[Upstream], limits: ClientLimits | None = None, clock: TimerClock = LOOP_CLOCK
    ) -> None:
        self.upstreams = upstreams
        self.server = Server(self.serve, limits, clock)
        self.outcomes: list[Outcome] | None = None  # a list: they are kept
        self._turns = cycle(upstreams)

    async def listen(self, port: int = 0) -> int:
        sock = bound_socket("127.0.0.1", port)
        await self.server.listen(sock)
        return int(sock.getsockname()[1])

    async def stop(self, grace_s: float = 1.0) -> int:
        num_dropped = await self.server.stop(grace_s)
        for upstream in self.upstreams:
            upstream.close()
        return num_dropped

    def serve(self, exchange: Exchange) -> None:
        request = exchange.request

        def done(outcome: Outcome) -> None:
            if self.outcomes is not None:
                self.outcomes.append(outcome)
            if outcome.end is End.FAILED_BEFORE:
                assert outcome.failure is not None
                exchange.refuse(EngineUnavailable(f"{outcome.failure.kind}: {outcome.failure.message}"))
            elif outcome.end is End.FAILED_AFTER:
                exchange.abort()

        forward(
            exchange,
            next(self._turns),
            method=request.method,
            target=request.target,
            headers=JSON,
            body=request.body,
            done=done,
        )


async def main(port: int, upstream_ports: Sequence[int]) -> None:
    gateway = BareGateway([Upstream("127.0.0.1", one) for one in upstream_ports])
    print(f"http://127.0.0.1:{await gateway.listen(port)}", flush=True)
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
