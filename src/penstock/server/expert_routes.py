"""Experts of a mixture: how many tokens each was given, and a new placement by it.

GET  /v1/penstock/experts              tokens by layer and expert since the start, and by rank: an ExpertLoad, which is
                                       also the file that `expert_counts` names
POST /v1/penstock/experts/rebalance    place experts anew, by what was counted; answers when all ranks have theirs
"""

from __future__ import annotations

import msgspec

from penstock.api.asgi import Request, Route
from penstock.api.sink import Sink, json_response
from penstock.core.errors import UnsupportedTask
from penstock.engine.client import EngineClient
from penstock.server.gateway_headers import GatewayTrust

PATH = "/v1/penstock/experts"


class RebalanceReport(msgspec.Struct, frozen=True):
    num_layers: int  # whose experts were moved
    imbalance_before: float  # the busiest rank's tokens by the mean, of the tokens that it was planned for
    imbalance_after: float


class ExpertRoutes:
    def __init__(self, engine: EngineClient, trust: GatewayTrust) -> None:
        self._engine = engine
        self._trust = trust

    def routes(self) -> list[Route]:
        return [Route("GET", PATH, self.load), Route("POST", f"{PATH}/rebalance", self.rebalance)]

    async def load(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        found = self._engine.experts.load
        if found is None:
            raise UnsupportedTask("this model is no mixture of experts, or nothing was counted yet")
        await json_response(sink, 200, msgspec.json.encode(found))

    async def rebalance(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        done = await self._engine.experts.rebalance()
        report = RebalanceReport(done.num_layers, round(done.before, 4), round(done.after, 4))
        await json_response(sink, 200, msgspec.json.encode(report))
