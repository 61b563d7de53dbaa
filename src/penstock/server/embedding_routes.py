"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify: whole texts in, numbers out.

Encoders, and decoders pooled, embed. Two texts go together as far as their vectors do; a decoder rather says how likely
the one is after the other, which tells more: a document is as relevant as it makes the query likely (Sachan et al.
2022). A model that was trained to read both at once scores them itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from penstock.api import relay
from penstock.api.asgi import Request, Route
from penstock.api.classify import CLASSIFY_PATHS, class_list, parse_classify
from penstock.api.openai import new_id
from penstock.api.openai.embeddings import embedding_list, parse_embedding, shortened
from penstock.api.rerank import RERANK_PATHS, SCORE_PATHS, parse_rerank, parse_score, ranking, score_list
from penstock.api.sink import Sink, json_response
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.request import Cost
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayHeaders, GatewayTrust
from penstock.server.offload import Offload
from penstock.server.recorder import RequestRecorder, TextWork
from penstock.server.text_limits import MAX_CONTEXTS
from penstock.server.text_models import Job, TextModel, TextModels

_MAX_WAITING = 16_384  # texts; beyond it requests are refused
MAX_TOKENS = 1 << 20  # of all texts of a request, a query once per document; OpenAI allows 300,000
_VALUE_BYTES = 16  # of a number in JSON
_ASKING = "Passage: {}\nPlease write a question based on this passage.\nQuestion:"


class EmbeddingRoutes:
    def __init__(
        self,
        models: TextModels,
        recorder: RequestRecorder,
        drain: Drain,
        trust: GatewayTrust,
        offload: Offload,
        *,
        max_body_bytes: int,
    ) -> None:
        self._models = models
        self._recorder = recorder
        self._drain = drain
        self._trust = trust
        self._offload = offload
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        rerank, score = partial(self._serve, "rerank", self._rerank), partial(self._serve, "score", self._score)
        classify = partial(self._serve, "classify", self._classify)
        return [
            Route("POST", "/v1/embeddings", partial(self._serve, "embeddings", self._embed)),
            *(Route("POST", path, rerank) for path in RERANK_PATHS),
            *(Route("POST", path, score) for path in SCORE_PATHS),
            *(Route("POST", path, classify) for path in CLASSIFY_PATHS),
        ]

    async def _serve(self, route: str, read: Callable[[GatewayHeaders], Job], request: Request, sink: Sink) -> None:
        with self._recorder.request(route, request.id, request.convention) as record:
            record.context = request.trace_context
            incoming = self._trust.read(request, await request.body(self._max_body_bytes))
            job = await self._offload.run(len(incoming.body), partial(read, incoming))
            self._drain.check()
            if job.model.num_waiting + len(job.texts) > _MAX_WAITING:
                raise Overloaded(f"{job.model.num_waiting} texts are waiting already", retry_after_s=1.0)
            work = record.texts = TextWork(len(job.texts), job.num_tokens, incoming.namespace, job.model.name)
            values, device_s = await request.while_connected(job.model.compute(new_id(request.id), job))
            work.cost = Cost(device_s=device_s)
            cost = [(relay.COST_HEADER.encode(), relay.cost_value(work.cost))] if incoming.is_from_gateway else []
            size_bytes = _VALUE_BYTES * values.size + len(incoming.body)  # a ranking repeats its documents
            await json_response(sink, 200, await self._offload.write(size_bytes, partial(job.answer, values)), cost)

    # -- what is asked

    def _embed(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_embedding(incoming.body)
        model = self._models.find_text_model(wanted.model, "embeddings")
        inputs, size = wanted.inputs(model.limits.vocab_size), model.dimensions
        if wanted.dimensions is not None and wanted.dimensions > size:
            raise InvalidRequest(f"dimensions: this model's vectors have {size}", param="dimensions")
        keep = wanted.truncate_prompt_tokens
        encoded = iter(_encode(model, [one for one in inputs if isinstance(one, str)], keep, param="input"))
        ids = [next(encoded) if isinstance(one, str) else one for one in inputs]
        texts = [model.limits.fit(text, keep_first=keep, param="input") for text in ids]
        form, num_tokens = wanted.encoding_format or "float", sum(map(len, texts))
        _check_total(num_tokens, "input")
        return Job(
            model,
            texts,
            lambda found: embedding_list(wanted.model, shortened(found, wanted.dimensions), form, num_tokens),
        )

    def _rerank(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_rerank(incoming.body)
        model = self._models.find_text_model(wanted.model, "relevance")
        texts, keep = wanted.texts(), wanted.truncate_prompt_tokens
        tell = partial(ranking, incoming.origin.id, wanted.model, wanted)
        if model.relevance == "pairs":
            return _read_together(model, [(wanted.query, text) for text in texts], keep, tell)
        if model.relevance == "cosine":
            return _compared(model, [wanted.query], texts, keep, tell)
        return _likely(
            model,
            [_ASKING.format(text) for text in texts],
            [f" {wanted.query}"] * len(texts),
            keep,
            lambda scores, num: tell([math.exp(one) for one in scores], num),
        )

    def _score(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_score(incoming.body)
        model = self._models.find_text_model(wanted.model, "relevance")
        pairs, origin, keep = wanted.pairs(), incoming.origin, wanted.truncate_prompt_tokens
        tell = partial(score_list, origin.id, wanted.model, origin.created)
        if model.relevance == "pairs":
            return _read_together(model, pairs, keep, tell)
        firsts, others = [one for one, _ in pairs], [other for _, other in pairs]
        if model.relevance == "likelihood":
            return _likely(model, firsts, others, keep, tell)
        shared = firsts[: len(wanted.firsts())]
        return _compared(model, shared, others, keep, tell)

    def _classify(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_classify(incoming.body)
        model, origin = self._models.find_text_model(wanted.model, "classification"), incoming.origin
        keep, labels = wanted.truncate_prompt_tokens, model.labels
        encoded = _encode(model, wanted.texts(), keep, param="input")
        texts = [model.limits.fit(text, keep_first=keep, param="input") for text in encoded]
        num_tokens = sum(map(len, texts))
        _check_total(num_tokens, "input")
        return Job(
            model,
            texts,
            lambda found: class_list(origin.id, wanted.model, origin.created, labels, found, num_tokens),
            is_raw=wanted.is_raw,
        )


# -- how it is found


def _compared(
    model: TextModel, firsts: list[str], others: list[str], keep: int | None, tell: Callable[[list[float], int], bytes]
) -> Job:
    """The cosine of each of the others and its first, or the only one."""
    ids = _encode(model, [*firsts, *others], keep)
    texts = [model.limits.fit(one, keep_first=keep, param=None) for one in ids]
    num_tokens, count = sum(map(len, texts)), len(firsts)
    _check_total(num_tokens, None)
    return Job(model, texts, lambda found: tell((found[:count] * found[count:]).sum(axis=1).tolist(), num_tokens))


def _read_together(
    model: TextModel, pairs: list[tuple[str, str]], keep: int | None, tell: Callable[[list[float], int], bytes]
) -> Job:
    """The score that the model itself gives two texts."""
    found = model.limits.fit_pairs(pairs, keep_first=keep)
    num_tokens = sum(len(one.ids) for one in found)
    _check_total(num_tokens, None)
    return Job(
        model,
        [one.ids for one in found],
        lambda scores: tell(scores[:, 0].tolist(), num_tokens),
        types=[one.types for one in found],
    )


def _likely(
    model: TextModel, firsts: list[str], others: list[str], keep: int | None, tell: Callable[[list[float], int], bytes]
) -> Job:
    """The mean log probability of each second text's tokens, after the first. If a pair is too long, the first loses
    its end."""
    _check(model, firsts, keep)
    after = _encode(model, others, None, add_special_tokens=False)
    before = _encode(model, firsts, keep)
    most = model.limits.max_tokens if keep is None or keep == -1 else keep
    rooms = [max(1, most - len(other)) for other in after]
    _check_total(
        sum(min(len(one), room) + len(other) for one, other, room in zip(before, after, rooms, strict=True)), None
    )
    texts = []
    for one, other, room in zip(before, after, rooms, strict=True):
        first = model.limits.fit(one, keep_first=None if keep is None else room, param=None)
        texts.append(model.limits.fit([*first, *other], keep_first=None, param=None))
    num_tokens = sum(map(len, texts))
    scored = [max(1, len(other)) for other in after]
    return Job(model, texts, lambda found: tell(found[:, 0].tolist(), num_tokens), scored)


def _encode(
    model: TextModel, texts: list[str], keep: int | None, *, add_special_tokens: bool = True, param: str | None = None
) -> list[list[int]]:
    _check(model, texts, keep, param)
    check = None if keep is not None else partial(model.limits.check_tokens, param=param)
    return model.limits.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens, check=check)


def _check(model: TextModel, texts: list[str], keep: int | None, param: str | None = None) -> None:
    """Refuses texts that cannot fit, and those that are too long to be cut, before any is tokenized."""
    for text in texts:
        model.limits.check_text(text, param, contexts=1 if keep is None else MAX_CONTEXTS)


def _check_total(num_tokens: int, param: str | None) -> None:
    if num_tokens > MAX_TOKENS:
        raise InvalidRequest(
            f"the texts have {num_tokens} tokens together; a request may have {MAX_TOKENS}", param=param
        )
