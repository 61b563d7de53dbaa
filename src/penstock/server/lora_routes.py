"""Adapters come and go at run time, by the calls that vLLM has for it; for those who may act as a gateway.

POST /v1/load_lora_adapter     {"lora_name", "lora_path", "pinned"?, "load_inplace"?}
POST /v1/unload_lora_adapter   {"lora_name"}; answers when the last request that runs with it has ended
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.api.asgi import Request, Route
from penstock.api.decoding import WireStruct, decode
from penstock.api.sink import Sink, respond
from penstock.core.errors import ModelError
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.lora import Adapters, as_refusal

_MAX_BYTES = 64 << 10
Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadLora(WireStruct):
    lora_name: Text
    lora_path: Text
    pinned: bool = False
    load_inplace: bool = False


class UnloadLora(WireStruct):
    lora_name: Text
    lora_int_id: int | None = None  # vLLM's own; not needed


_LOAD, _UNLOAD = msgspec.json.Decoder(LoadLora), msgspec.json.Decoder(UnloadLora)


class AdapterRoutes:
    def __init__(self, adapters: Adapters, trust: GatewayTrust) -> None:
        self._adapters = adapters
        self._trust = trust

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/load_lora_adapter", self.load),
            Route("POST", "/v1/unload_lora_adapter", self.unload),
        ]

    async def load(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        asked = decode(_LOAD, await request.body(_MAX_BYTES))
        try:
            await self._adapters.load(
                asked.lora_name, asked.lora_path, pinned=asked.pinned, in_place=asked.load_inplace
            )
        except ModelError as error:
            raise as_refusal(error) from None
        await _say(sink, f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: Request, sink: Sink) -> None:
        self._trust.check(request)
        request.check_is_json()
        asked = decode(_UNLOAD, await request.body(_MAX_BYTES))
        await request.while_connected(self._adapters.unload(asked.lora_name))
        await _say(sink, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def _say(sink: Sink, text: str) -> None:
    await respond(sink, 200, text.encode(), [(b"content-type", b"text/plain; charset=utf-8")])
