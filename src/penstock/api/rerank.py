"""/v1/rerank as Cohere, Jina and vLLM have it, and vLLM's /v1/score: how well texts go together."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.api.decoding import Refused, WireStruct, decode
from penstock.api.openai.embeddings import KeepFirst, encode, text_usage

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # Jina's, Cohere's, vLLM's
SCORE_PATHS = ("/v1/score", "/score")
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


Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_DOCUMENTS)]


class ScoreRequest(WireStruct):
    """vLLM has two pairs of names for the texts, its first one and its newer one."""

    model: Annotated[str, Meta(min_length=1)]
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    truncate_prompt_tokens: KeepFirst | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self._names()
        for name in ("text_1", "text_2", "queries", "documents"):
            if (getattr(self, name) is not None) != (name in (first, second)):
                is_missing = name in (first, second)
                raise Refused(name, "is required" if is_missing else f"cannot go with {first} and {second}")
        firsts, others = getattr(self, first), getattr(self, second)
        if isinstance(firsts, list) and isinstance(others, str):
            raise Refused(second, f"is one text, so {first} must be one too; give it as often as {first} has texts")
        if isinstance(firsts, list) and len(firsts) not in (1, len(others)):
            raise Refused(first, f"has {len(firsts)} texts and {second} has {len(others)}: as many, or one")

    def firsts(self) -> list[str]:
        """First texts: as many as the others, or one for all."""
        return _listed(getattr(self, self._names()[0]))

    def pairs(self) -> list[tuple[str, str]]:
        firsts, others = self.firsts(), _listed(getattr(self, self._names()[1]))
        return list(zip(firsts * len(others) if len(firsts) == 1 else firsts, others, strict=True))

    def _names(self) -> tuple[str, str]:
        has_first_names = self.text_1 is not None or self.text_2 is not None
        has_newer_names = self.queries is not None or self.documents is not None
        return ("queries", "documents") if has_newer_names and not has_first_names else ("text_1", "text_2")


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


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
