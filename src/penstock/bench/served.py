"""Facts to know of a server before it is put under load: its model, its context, and how long its words are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from penstock.api import tokenizer_bundle as model_text
from penstock.bench.answer import digest
from penstock.bench.client import Client, RequestFailed
from penstock.bench.speech import Speech
from penstock.core.errors import ConfigError, ModelError
from penstock.hub.resolve import describe
from penstock.terminal.progress import ProgressBar
from penstock.text.tokenizer import Tokenizer
from penstock.workload.conversations import Message, Turn
from penstock.workload.words import COMMON, LONG, SHORT, Scale, single_token_words, text

ATTEMPTS, PAUSE_S = 3, 1.0  # at a first question: a server may be busy
PASSING = ("http_429", "http_500", "http_502", "http_503", "http_529")


class _Meta(msgspec.Struct):
    n_ctx_train: int | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None  # penstock, vLLM, SGLang
    context_length: int | None = None  # several providers
    meta: _Meta | None = None  # llama.cpp


class _Models(msgspec.Struct):
    data: list[_Model]


_models_decoder = msgspec.json.Decoder(_Models)


@dataclass(frozen=True)
class Served:
    model: str
    context: int | None  # tokens; None: it does not say


@dataclass(frozen=True)
class Vocabulary:
    words: Sequence[str]
    origin: str  # for the report: where the tokenizer came from
    count: Callable[[str], int] | None  # None: there is no tokenizer


async def find_served(client: Client, model: str | None) -> Served:
    """The model asked for, or the first that the server names."""
    try:
        named = _models_decoder.decode((await client.get("/v1/models")).body).data
    except (RequestFailed, msgspec.MsgspecError) as error:
        is_there = isinstance(error, msgspec.MsgspecError) or error.kind.startswith("http_")
        if model is None or not is_there:
            raise ConfigError(f"no OpenAI-compatible server answers at {client.url}: {error}") from None
        return Served(model, None)  # not every server lists its models
    found = next((one for one in named if model in (None, one.id)), None)
    if found is None:
        if model is None:
            raise ConfigError(f"{client.url} serves no model", param="model")
        return Served(model, None)  # an alias, perhaps; what it is will be seen at the first question
    contexts = (found.max_model_len, found.context_length, found.meta.n_ctx_train if found.meta else None)
    return Served(found.id, next(filter(None, contexts), None))


async def find_vocabulary(client: Client, model: str, reference: str | None) -> Vocabulary:
    """`reference` is the user's; without it the server is asked, as penstock's hand theirs over, then the hub."""
    if reference is not None:
        return _vocabulary(Tokenizer.load(describe(reference, progress=ProgressBar()).tokenizer_source), reference)
    try:
        handed = model_text.decode((await client.get(model_text.PATH)).body)
        return _vocabulary(Tokenizer.from_json(handed.tokenizer, handed.special_tokens), "the server's own")
    except (RequestFailed, msgspec.MsgspecError):
        pass
    try:
        return _vocabulary(Tokenizer.load(describe(model, progress=ProgressBar()).tokenizer_source), model)
    except (ModelError, OSError):
        return Vocabulary(COMMON, "none: common words, as long as the server's usage says", None)


async def measure_scale(client: Client, speech: Speech, words: Sequence[str], seed: str, *, has_system: bool) -> Scale:
    """Returns what the server makes of a short text and a long one. Raises ConfigError if it will not answer."""
    counted = []
    for num_words in (SHORT, LONG):
        messages: list[Message] = [
            {"role": "user", "content": text(words, num_words, Random(f"{seed} scale {num_words}"))}
        ]
        if has_system:
            messages.insert(0, {"role": "system", "content": ""})
        counted.append(await _prompt_tokens(client, speech, messages))
    short, long = counted
    if short is None or long is None or long <= short:  # it says nothing, or nothing that could be true
        return Scale()
    return Scale.of(short, long)


async def _prompt_tokens(client: Client, speech: Speech, messages: list[Message]) -> int | None:
    body = speech.body(messages, Turn((), 1))
    for attempt in range(ATTEMPTS):
        try:
            return digest(await client.post(speech.path, body)).prompt_tokens
        except RequestFailed as failure:
            if failure.kind == "no_text":  # a single token may have none
                return None
            if attempt + 1 == ATTEMPTS or failure.kind not in PASSING:
                raise ConfigError(f"{client.url} does not answer a first question: {failure}") from None
            await asyncio.sleep(PAUSE_S)
    return None


def _vocabulary(tokenizer: Tokenizer, origin: str) -> Vocabulary:
    words = single_token_words(tokenizer)
    if len(words) < 100:
        return Vocabulary(COMMON, f"{origin} (it has too few words: common ones are used)", _counter(tokenizer))
    return Vocabulary(words, origin, _counter(tokenizer))


def _counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda answer: tokenizer.count([answer], add_special_tokens=False)[0]
