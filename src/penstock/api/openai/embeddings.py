"""The request of /v1/embeddings, and its answer: one vector per text, as numbers or as base64 of float32."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, WireStruct, decode
from penstock.api.openai.completions import Prompt, TokenIds
from penstock.api.openai.generation import TokenId, check_token_ids

if TYPE_CHECKING:  # a gateway reads requests, and makes no vectors
    import numpy as np
    import numpy.typing as npt

MAX_TEXTS = 2048  # OpenAI's limit on input

Vectors: TypeAlias = "npt.NDArray[np.float32]"  # [texts, dimensions]
KeepFirst = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # -1: as many as the model takes

encode = msgspec.json.Encoder().encode


class EmbeddingRequest(WireStruct):
    model: Annotated[str, Meta(min_length=1)]
    input: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**16)] | None = None

    # An extension, under the name that users of vLLM know: longer texts lose their ends, and are not refused.
    truncate_prompt_tokens: KeepFirst | None = None

    # Labels for the client's own books: they change nothing here.
    user: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.input, list) and len(set(map(type, self.input))) > 1:
            raise Refused("input", "expected only strings, only token ids or only lists of token ids, got a mixture")
        if len(self._inputs()) > MAX_TEXTS:
            raise Refused("input", f"has more than {MAX_TEXTS} texts")
        if any(not text for text in self._inputs()):
            raise Refused("input", "a text is empty")
        if self.truncate_prompt_tokens == 0:
            raise Refused("truncate_prompt_tokens", "must leave a token; -1 is as many as the model takes")

    def inputs(self, vocab_size: int) -> list[Prompt]:
        """Every text, in order. Raises InvalidRequest for token ids that do not exist."""
        inputs = self._inputs()
        for one in inputs:
            if isinstance(one, list):
                check_token_ids(one, vocab_size, "input")
        return inputs

    def _inputs(self) -> list[Prompt]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [cast(list[int], self.input)]
        return cast(list[Prompt], self.input)


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


def parse_embedding(body: bytes) -> EmbeddingRequest:
    return decode(_DECODER, body)


def shortened(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first so many dimensions, of length one again."""
    if dimensions is None:
        return vectors
    import numpy as np

    cut = vectors[:, :dimensions]
    lengths: Vectors = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.maximum(lengths, 1e-12)).astype(np.float32)


def embedding_list(model: str, vectors: Vectors, form: str, num_tokens: int) -> bytes:
    shown: list[Any]
    if form == "base64":
        shown = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        shown = [msgspec.Raw(encode(row.tolist())) for row in vectors]  # one at a time: other threads get their turn
    data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(shown)]
    return encode({"object": "list", "data": data, "model": model, "usage": text_usage(num_tokens)})


def text_usage(num_tokens: int) -> dict[str, int]:
    """Goes last in an answer: a gateway looks for it at the end."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
