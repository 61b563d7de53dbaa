"""/v1/models: what a client sees of the models that are served."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int  # Unix seconds
    owned_by: str = "penstock"
    max_model_len: int | None = None  # tokens of context, under the name vLLM gave it


def model_object(card: ModelCard) -> bytes:
    return msgspec.json.encode(card)


def model_list(cards: Sequence[ModelCard]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": cards})
