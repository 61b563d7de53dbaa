"""/v1/rerank as Cohere, Jina and vLLM have it, and vLLM's /v1/score: how well texts go together."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, WireStruct, decode
from penstock.api.openai.embeddings import KeepFirst, encode, text_usage

MAX_DOCUMENTS = 1000

Text = Annotated[str, Meta(min_length=1)]


class Document(WireStruct):
    text: Text


class RerankRequest(WireStruct):
    model: Annotated[str, Meta(min_length=1)]
    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0: all
    return_documents: bool | None = None  # they are, unless told otherwise
    truncate_prompt_tokens: KeepFirst | None = None
    user: str | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class ScoreRequest(WireStruct):
    model: Annotated[str, Meta(min_length=1)]
    text_1: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    text_2: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    truncate_prompt_tokens: KeepFirst | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.text_1, list) and isinstance(self.text_2, str):
            raise Refused("text_2", "is one text, so text_1 must be one too; give it as often as text_1 has texts")
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self.text_2)):
            raise Refused("text_1", f"has {len(self.text_1)} texts and text_2 has {len(self.text_2)}: as many, or one")

    def pairs(self) -> list[tuple[str, str]]:
        others = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        firsts = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        return list(zip(firsts * len(others) if len(firsts) == 1 else firsts, others, strict=True))


_RERANK, _SCORE = msgspec.json.Decoder(RerankRequest), msgspec.json.Decoder(ScoreRequest)


def parse_rerank(body: bytes) -> RerankRequest:
    return decode(_RERANK, body)


def parse_score(body: bytes) -> ScoreRequest:
    return decode(_SCORE, body)


def ranking(id: str, model: str, wanted: RerankRequest, scores: list[float], num_tokens: int) -> bytes:
    """Best first."""
    texts = wanted.texts()
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: wanted.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if wanted.return_documents is not False:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    return encode({"id": f"rerank-{id}", "model": model, "results": results, "usage": text_usage(num_tokens)})


def score_list(id: str, model: str, created: int, scores: list[float], num_tokens: int) -> bytes:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return encode(
        {
            "id": f"score-{id}",
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": text_usage(num_tokens),
        }
    )
