"""The watermark of an answer: what the gateway says of its tenant, else the replica's own, else what the request
asks for. A request cannot change what an operator has set. Clients see no secret, and no name that is not their own."""

from __future__ import annotations

import asyncio
import logging

from penstock.api.openai import GenerationRequest
from penstock.core.errors import ConfigError, InvalidRequest, KeyNotFound, PenstockError, UnsupportedParameter
from penstock.core.sampling import SamplingParams
from penstock.core.watermark import Scheme, Watermark
from penstock.hub.watermarks import WatermarkFile
from penstock.server.gateway_headers import GatewayHeaders

log = logging.getLogger("penstock.server")


class Watermarks:
    def __init__(self, file: WatermarkFile, default: str | None = None) -> None:
        self._file = file
        self._default = default
        self._known: dict[str, Watermark] = {}

    async def find(self, incoming: GatewayHeaders, wanted: GenerationRequest) -> Watermark | None:
        asked, own = wanted.watermark, self._default
        if asked is not None and (incoming.is_from_gateway or own not in (None, asked)):
            raise UnsupportedParameter("watermark: is set by the operator of this server", param="watermark")
        name = incoming.watermark or own or asked
        if name is None:
            return None
        if name not in self._known:
            try:
                self._known[name] = await asyncio.to_thread(self._file.find, name)
            except PenstockError as error:
                raise _told(error, name, asked) from None
        return self._known[name]


def check_mark(watermark: Watermark, sampling: SamplingParams, wanted: GenerationRequest) -> None:
    """Refuses a wish that would come to nothing."""
    if wanted.watermark is not None and watermark.scheme is Scheme.GUMBEL and sampling.is_greedy:
        raise InvalidRequest(
            f"watermark: '{wanted.watermark}' is of the gumbel scheme, which takes the place of chance; at temperature "
            "0 there is none, so nothing can be marked",
            param="watermark",
        )


def _told(error: PenstockError, name: str, asked: str | None) -> PenstockError:
    if name == asked and isinstance(error, KeyNotFound):
        return InvalidRequest(f"watermark: there is none of the name '{name}' here", param="watermark")
    log.error("answers are to have the watermark %s: %s", name, error.message)
    return ConfigError("this server is not set up as it should be; its log says more")
