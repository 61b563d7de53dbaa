"""/v1/embeddings, /v1/rerank and /v1/score: whole texts in, numbers out.

Encoders, and decoders pooled, embed. Two texts go together as far as their vectors do; a decoder rather says how likely
the one is after the other, which tells more: a document is as relevant as it makes the query likely (Sachan et al.
2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.api import relay
from penstock.api.asgi import Request, Route
from penstock.api.openai import new_id
from penstock.api.openai.embeddings import Vectors, embedding_list, parse_embedding, shortened
from penstock.api.rerank import RERANK_PATHS, SCORE_PATHS, parse_rerank, parse_score, ranking, score_list
from penstock.api.sink import Sink, json_response
from penstock.core.errors import InvalidRequest, Overloaded
from penstock.core.request import Cost
from penstock.engine.client import EngineClient
from penstock.engine.messages import Embed
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayHeaders, GatewayTrust
from penstock.server.offload import Offload
from penstock.server.recorder import Recorder, TextWork
from penstock.server.served_model import MAX_CONTEXTS, ServedModel

_MAX_WAITING = 16_384  # texts; beyond it requests are refused
MAX_TOKENS = 1 << 20  # of all texts of a request, a query once per document; OpenAI allows 300,000
_VALUE_BYTES = 16  # of a number in JSON
_ASKING = "Passage: {}\nPlease write a question based on this passage.\nQuestion:"


@dataclass(frozen=True)
class Job:
    texts: list[list[int]]
    answer: Callable[[Vectors], bytes]  # of [texts, dimensions]
    scored: list[int] | None = None  # how many of each text's last tokens count; None: vectors are wanted

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))


class EmbeddingRoutes:
    def __init__(
        self,
        model: ServedModel,
        engine: EngineClient,
        recorder: Recorder,
        drain: Drain,
        trust: GatewayTrust,
        offload: Offload,
        *,
        max_body_bytes: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._recorder = recorder
        self._drain = drain
        self._trust = trust
        self._offload = offload
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        rerank, score = partial(self._serve, "rerank", self._rerank), partial(self._serve, "score", self._score)
        return [
            Route("POST", "/v1/embeddings", partial(self._serve, "embeddings", self._embed)),
            *(Route("POST", path, rerank) for path in RERANK_PATHS),
            *(Route("POST", path, score) for path in SCORE_PATHS),
        ]

    async def _serve(self, route: str, read: Callable[[GatewayHeaders], Job], request: Request, sink: Sink) -> None:
        with self._recorder.request(route, request.id, request.convention) as record:
            record.context = request.trace_context
            incoming = self._trust.read(request, await request.body(self._max_body_bytes))
            self._model.check_embeds()
            job = await self._offload.run(len(incoming.body), partial(read, incoming))
            self._drain.check()
            if self._engine.embeddings.num_texts + len(job.texts) > _MAX_WAITING:
                raise Overloaded(f"{self._engine.embeddings.num_texts} texts are waiting already", retry_after_s=1.0)
            work = record.texts = TextWork(len(job.texts), job.num_tokens, incoming.namespace)
            answer = await request.while_connected(
                self._engine.embeddings(Embed(new_id(request.id), job.texts, job.scored))
            )
            work.cost = Cost(device_s=answer.device_s)
            values = np.frombuffer(answer.values, np.float32).reshape(len(job.texts), -1)
            cost = [(relay.COST_HEADER.encode(), relay.cost_value(work.cost))] if incoming.is_from_gateway else []
            size_bytes = _VALUE_BYTES * values.size + len(incoming.body)  # a ranking repeats its documents
            await json_response(sink, 200, await self._offload.write(size_bytes, partial(job.answer, values)), cost)

    # -- what is asked

    def _embed(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_embedding(incoming.body)
        self._model.check_base_name(wanted.model)
        inputs, size = wanted.inputs(self._model.config.vocab_size), self._model.config.hidden_size
        if wanted.dimensions is not None and wanted.dimensions > size:
            raise InvalidRequest(f"dimensions: this model's vectors have {size}", param="dimensions")
        keep = wanted.truncate_prompt_tokens
        encoded = iter(self._encode([one for one in inputs if isinstance(one, str)], keep, param="input"))
        ids = [next(encoded) if isinstance(one, str) else one for one in inputs]
        job = [self._model.fit_text(text, keep_first=keep, param="input") for text in ids]
        form, num_tokens = wanted.encoding_format or "float", sum(map(len, job))
        _check_total(num_tokens, "input")
        return Job(
            job, lambda found: embedding_list(wanted.model, shortened(found, wanted.dimensions), form, num_tokens)
        )

    def _rerank(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_rerank(incoming.body)
        self._model.check_base_name(wanted.model)
        texts = wanted.texts()
        tell = partial(ranking, incoming.origin.id, wanted.model, wanted)
        if not self._model.generates:
            return self._compared([wanted.query], texts, wanted.truncate_prompt_tokens, tell)
        return self._likely(
            [_ASKING.format(text) for text in texts],
            [f" {wanted.query}"] * len(texts),
            wanted.truncate_prompt_tokens,
            lambda scores, num: tell([math.exp(one) for one in scores], num),
        )

    def _score(self, incoming: GatewayHeaders) -> Job:
        wanted = parse_score(incoming.body)
        self._model.check_base_name(wanted.model)
        pairs, origin = wanted.pairs(), incoming.origin
        tell = partial(score_list, origin.id, wanted.model, origin.created)
        firsts, others = [one for one, _ in pairs], [other for _, other in pairs]
        if self._model.generates:
            return self._likely(firsts, others, wanted.truncate_prompt_tokens, tell)
        shared = firsts[: len(wanted.firsts())]
        return self._compared(shared, others, wanted.truncate_prompt_tokens, tell)

    # -- how it is found

    def _compared(
        self, firsts: list[str], others: list[str], keep: int | None, tell: Callable[[list[float], int], bytes]
    ) -> Job:
        """The cosine of each of the others and its first, or the only one."""
        ids = self._encode([*firsts, *others], keep)
        texts = [self._model.fit_text(one, keep_first=keep, param=None) for one in ids]
        num_tokens, count = sum(map(len, texts)), len(firsts)
        _check_total(num_tokens, None)
        return Job(texts, lambda found: tell((found[:count] * found[count:]).sum(axis=1).tolist(), num_tokens))

    def _likely(
        self, firsts: list[str], others: list[str], keep: int | None, tell: Callable[[list[float], int], bytes]
    ) -> Job:
        """The mean log probability of each second text's tokens, after the first. Where it is too long, the first
        loses its end."""
        self._check(firsts, keep)
        after = self._encode(others, None, add_special_tokens=False)
        before = self._encode(firsts, keep)
        most = self._model.max_model_len if keep is None or keep == -1 else keep
        rooms = [max(1, most - len(other)) for other in after]
        _check_total(
            sum(min(len(one), room) + len(other) for one, other, room in zip(before, after, rooms, strict=True)), None
        )
        texts = []
        for one, other, room in zip(before, after, rooms, strict=True):
            first = self._model.fit_text(one, keep_first=None if keep is None else room, param=None)
            texts.append(self._model.fit_text([*first, *other], keep_first=None, param=None))
        num_tokens = sum(map(len, texts))
        scored = [max(1, len(other)) for other in after]
        return Job(texts, lambda found: tell(found[:, 0].tolist(), num_tokens), scored)

    def _encode(
        self, texts: list[str], keep: int | None, *, add_special_tokens: bool = True, param: str | None = None
    ) -> list[list[int]]:
        self._check(texts, keep, param)
        check = None if keep is not None else partial(self._model.check_text_tokens, param=param)
        return self._model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens, check=check)

    def _check(self, texts: list[str], keep: int | None, param: str | None = None) -> None:
        """Refuses texts that cannot fit, and those that are too long to be cut, before any is tokenized."""
        for text in texts:
            self._model.check_text(text, param, contexts=1 if keep is None else MAX_CONTEXTS)


def _check_total(num_tokens: int, param: str | None) -> None:
    if num_tokens > MAX_TOKENS:
        raise InvalidRequest(
            f"the texts have {num_tokens} tokens together; a request may have {MAX_TOKENS}", param=param
        )
