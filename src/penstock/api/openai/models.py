"""/v1/models: what a client sees of the models that are served.

OpenAI's and Anthropic's clients ask at the same path and skip fields they do not know, so one answer holds what both
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int  # Unix seconds
    owned_by: str = "penstock"
    max_model_len: int | None = None  # tokens of context, under the name vLLM gave it
    root: str | None = None  # as vLLM has it: an adapter's is where it was loaded from
    parent: str | None = None  # an adapter's base model
    description: str | None = None  # of a pipeline


def model_object(card: ModelCard) -> bytes:
    return msgspec.json.encode(_for_both(card))


def model_list(cards: Sequence[ModelCard]) -> bytes:
    page = {
        "has_more": False,
        "first_id": cards[0].id if cards else None,
        "last_id": cards[-1].id if cards else None,
    }
    return msgspec.json.encode({"object": "list", "data": [_for_both(card) for card in cards], **page})


def _for_both(card: ModelCard) -> dict[str, Any]:
    for_anthropic = {
        "type": "model",
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
    of_some = ("root", "parent", "description")
    own = {key: value for key, value in msgspec.structs.asdict(card).items() if key not in of_some or value}
    return own | for_anthropic
