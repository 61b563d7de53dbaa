"""/classify as vLLM has it: the label of each text, and how likely each label is. `scores` has the names of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, WireStruct, decode
from penstock.api.openai.embeddings import MAX_TEXTS, KeepFirst, Vectors, encode, text_usage

CLASSIFY_PATHS = ("/classify", "/v1/classify")  # the first is vLLM's

Text = Annotated[str, Meta(min_length=1)]


class ClassifyRequest(WireStruct):
    model: Annotated[str, Meta(min_length=1)]
    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)]
    truncate_prompt_tokens: KeepFirst | None = None
    use_activation: bool | None = None  # false: logits instead of probabilities
    activation: bool | None = None  # the older name of the same
    user: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncate_prompt_tokens == 0:
            raise Refused("truncate_prompt_tokens", "must leave a token; -1 is as many as the model takes")
        if self.activation is not None and self.use_activation is not None:
            raise Refused("activation", "is the older name of use_activation: give one of them")

    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def is_raw(self) -> bool:
        return False in (self.use_activation, self.activation)


_DECODER = msgspec.json.Decoder(ClassifyRequest)


def parse_classify(body: bytes) -> ClassifyRequest:
    return decode(_DECODER, body)


def class_list(id: str, model: str, created: int, labels: Sequence[str], values: Vectors, num_tokens: int) -> bytes:
    """`values`: of each label, text by text."""
    data: list[dict[str, Any]] = []
    for index, row in enumerate(values.tolist()):
        label = labels[max(range(len(row)), key=row.__getitem__)]
        scores = dict(zip(labels, row, strict=True))
        data.append({"index": index, "label": label, "probs": row, "num_classes": len(row), "scores": scores})
    return encode(
        {
            "id": f"classify-{id}",
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": text_usage(num_tokens),
        }
    )
