"""Requests made ready to generate: chat template, tokens, tools, limits, guide and watermark.

Each API parses its bodies into a `ParsedRequest`; a `PreparedRequest` is what the model will see of it. Work that grows
with a request's size, parsing included, is offloaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from penstock.api.openai import ChatRequest, CompletionRequest
from penstock.api.openai.chat import ImageAsked
from penstock.api.openai.guided import GuideAsked
from penstock.api.responses.truncation import without_oldest
from penstock.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    KeyNotFound,
    PenstockError,
    UnsupportedParameter,
)
from penstock.core.guide import Guide
from penstock.core.images import ImageInput
from penstock.core.thinking import Thinking
from penstock.core.watermark import Watermark
from penstock.hub.watermarks import WatermarkFile
from penstock.images.prompt import PlacedPrompt, num_placed, placed, spelled_out
from penstock.images.reading import ReadImage
from penstock.server.gateway_headers import GatewayHeaders
from penstock.server.guides import GuideTrials
from penstock.server.images import Images, ImagesByUrl
from penstock.server.offload import Offload
from penstock.server.prompt_scores import check_scored
from penstock.server.reasoning import Reasoning, ReasoningLimits
from penstock.server.served_model import ServedModel
from penstock.server.text_limits import MAX_CONTEXTS
from penstock.server.tool_calling import ToolCalling
from penstock.text.prompt_encoder import render, render_with_images
from penstock.text.stops import StopStrings

log = logging.getLogger("penstock.server")

_MAX_ECHOED = 8 << 20  # characters: an answer repeats the prompt once per choice
_ROOM = 1024  # tokens for the answer to a conversation that is cut, where its client sets no limit
_MAX_PROMPT_TOKENS = 4_000_000  # of all choices of a request: some 20 ms to send to the engine


@dataclass(frozen=True)
class ParsedRequest:
    """A request of any API, in the words of OpenAI's."""

    wanted: ChatRequest | CompletionRequest
    guide: GuideAsked | None = None  # what the answer must look like; None: what `wanted` says
    cuts_output: bool = False  # an output limit above what the prompt leaves is cut and not refused
    drops_turns: bool = False  # so are the oldest turns of a conversation that is longer than the context
    original: object = None  # the request in its own API's words, if its writer needs them
    replays: bool = False  # its writer must see every earlier piece of an answer that another replica began


Parse = Callable[[bytes], ParsedRequest]


class _Seeing(NamedTuple):
    """A request that shows images, which are to be read before anything else is done about it."""

    parsed: ParsedRequest
    asked: list[ImageAsked]


@dataclass
class PreparedRequest:
    model: ServedModel
    wanted: ChatRequest | CompletionRequest
    headers: GatewayHeaders
    prompts: list[list[int]]
    stops: StopStrings
    cuts_output: bool = False
    echoed: list[str] | None = None  # the text of each prompt, if answers begin with it
    calling: ToolCalling | None = None  # where tools may be called
    reasoning: Reasoning | None = None  # where the model reasons
    thinking: Thinking | None = None  # what its engine must know of that
    asked: GuideAsked | None = None
    guide: Guide | None = None  # what is asked, found to be good
    watermark: Watermark | None = None
    original: object = None
    replays: bool = False
    bad_words: list[list[int]] = field(default_factory=list)
    predicted_ids: list[int] = field(default_factory=list)
    placed: PlacedPrompt | None = None  # its one prompt, if it shows images
    shown: list[ImageAsked] = field(default_factory=list)  # images that the prompt shows
    images: tuple[ImageInput, ...] = ()
    held: ExitStack = field(default_factory=ExitStack)  # reserves memory for decoded images until it is closed

    @property
    def num_image_tokens(self) -> int:
        return self.placed.num_image_tokens if self.placed is not None else 0

    def engine_prompt(self, index: int) -> list[int]:
        """The ids of a prompt with those of images, which are in no vocabulary."""
        ids = self.prompts[index]
        return ids if self.placed is None else [*self.placed.keyed_ids(), *ids[len(self.placed.ids) :]]


class Preparer:
    def __init__(
        self,
        model: ServedModel,
        offload: Offload,
        guides: GuideTrials,
        watermarks: WatermarkFile,
        *,
        watermark: str | None,
        max_open: int,
        images: Images,
        reasoning: ReasoningLimits = ReasoningLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._model = model
        self._reasoning = reasoning
        self._offload = offload
        self._guides = guides
        self._watermarks = watermarks
        self._own_watermark = watermark
        self._known_watermarks: dict[str, Watermark] = {}
        self._max_open = max_open
        self._images = images

    async def prepare(self, parse: Parse, headers: GatewayHeaders) -> PreparedRequest:
        self._model.check_generates()
        prepared = await self._offload.run(len(headers.body), partial(self._parse_and_encode, parse, headers))
        if isinstance(prepared, _Seeing):
            prepared = await self._prepare_seeing(prepared, headers)
        with ExitStack() as held:
            held.push(prepared.held)
            if prepared.asked is not None:
                prepared.guide = await self._guides.check(prepared.asked, headers.tenancy.id)
            prepared.watermark = await self._find_watermark(headers, prepared.wanted.watermark)
            held.pop_all()
        return prepared

    async def _prepare_seeing(self, seeing: _Seeing, headers: GatewayHeaders) -> PreparedRequest:
        """The prepared form of a request with images. Their tokens are counted before they are decoded."""
        with ExitStack() as held:
            images = await self._images.read(seeing.asked, held)
            prepared = await self._offload.run(len(headers.body), partial(self._encode, seeing.parsed, headers, images))
            if prepared.placed is not None:
                held.enter_context(self._images.held(prepared.shown, images, prepared.wanted.num_choices()))
                prepared.images = await self._images.inputs(prepared.shown, images, prepared.placed)
                prepared.held = held.pop_all()
        return prepared

    async def count_tokens(self, parse: Callable[[bytes], ChatRequest], body: bytes) -> int:
        """The tokens of a chat's prompt, whether or not it fits the model."""
        found = await self._offload.run(len(body), partial(self._parse_and_count, parse, body))
        if isinstance(found, int):
            return found
        chat, asked = found
        with ExitStack() as held:
            images = await self._images.read(asked, held)
            return await self._offload.run(len(body), partial(self._count, chat, images))

    def _parse_and_count(
        self, parse: Callable[[bytes], ChatRequest], body: bytes
    ) -> int | tuple[ChatRequest, list[ImageAsked]]:
        chat = parse(body)
        self._model.check_name(chat.model)
        if asked := chat.images():
            self._images.check(asked)
            return chat, asked
        return self._count(chat, {})

    async def _find_watermark(self, headers: GatewayHeaders, asked: str | None) -> Watermark | None:
        """The watermark that the gateway names for its tenant, else the replica's own, else the one that the request
        asks for: a request cannot change what an operator has set."""
        own = self._own_watermark
        if asked is not None and (headers.is_from_gateway or own not in (None, asked)):
            raise UnsupportedParameter("watermark: is set by the operator of this server", param="watermark")
        name = headers.watermark or own or asked
        if name is None:
            return None
        if name not in self._known_watermarks:
            try:
                self._known_watermarks[name] = await asyncio.to_thread(self._watermarks.find, name)
            except PenstockError as error:
                if name == asked and isinstance(error, KeyNotFound):
                    missing = f"watermark: there is none of the name '{name}' here"
                    raise InvalidRequest(missing, param="watermark") from None
                # The client sees no name that is not its own.
                log.error("answers are to have the watermark %s: %s", name, error.message)
                raise ConfigError("this server is not set up as it should be; its log says more") from None
        return self._known_watermarks[name]

    def _parse_and_encode(self, parse: Parse, headers: GatewayHeaders) -> PreparedRequest | _Seeing:
        """A request with images is parsed, and no more."""
        parsed = parse(headers.body)
        self._model.check_name(parsed.wanted.model)
        if isinstance(parsed.wanted, ChatRequest) and (asked := parsed.wanted.images()):
            self._images.check(asked)
            return _Seeing(parsed, asked)
        return self._encode(parsed, headers, {})

    def _encode(self, parsed: ParsedRequest, headers: GatewayHeaders, images: ImagesByUrl) -> PreparedRequest:
        model, wanted, cuts_output = self._model, parsed.wanted, parsed.cuts_output
        echoed, calling, reasoning, placed = None, None, None, None
        shown: list[ImageAsked] = []
        if isinstance(wanted, CompletionRequest):
            prompts = self._completion(wanted, headers.prompt_ids)
            echoed = self._echoed(wanted, prompts) if wanted.echo else None
        else:
            if parsed.drops_turns and headers.prompt_ids is None:
                wanted = self._fitting(wanted, images)
            if images and (shown := wanted.images()):  # the oldest may be gone
                placed = self._seeing_chat(wanted, headers.prompt_ids, images)
                prompts = [placed.ids]
            else:
                prompts = self._chat(wanted, headers.prompt_ids)
            if cuts_output:
                model.check_output(wanted.output_limit())
            calling = ToolCalling.from_chat(wanted, model) if wanted.may_call() else None
            reasoning = Reasoning.from_chat(wanted, model, prompts[0], self._reasoning)
        asked = (parsed.guide if calling is None else calling.guide) or wanted.guide()
        if reasoning is not None:
            reasoning, more_ids = reasoning.begun(model.tokenizer, is_guided=asked is not None)
            prompts = [model.fit_prompt([*prompts[0], *more_ids], keep_last=None, param="messages")]
        _check_choices(wanted.num_choices(), prompts, max_open=self._max_open)
        check_scored(model, wanted, prompts, has_images=placed is not None)
        stops = StopStrings(wanted.stops(), include=bool(wanted.include_stop_str_in_output))
        if asked is not None:
            _check_unbarred(wanted, asked)
        thinking = None
        if reasoning is not None:
            thinking = reasoning.thinking(model.tokenizer, is_guided=asked is not None, may_call=calling is not None)
        return PreparedRequest(
            model,
            wanted,
            headers,
            prompts,
            stops,
            cuts_output,
            echoed,
            calling,
            reasoning,
            thinking,
            asked,
            original=parsed.original,
            replays=parsed.replays,
            bad_words=self._bad_words(wanted.bad_words or []),
            predicted_ids=self._predicted(wanted),
            placed=placed,
            shown=shown,
        )

    def _predicted(self, wanted: ChatRequest | CompletionRequest) -> list[int]:
        """Tokens of the text that the client expects: no more than an answer can have."""
        if not isinstance(wanted, ChatRequest) or wanted.prediction is None:
            return []
        text = wanted.prediction.text()
        self._model.check_prompt_text(text, "prediction", contexts=MAX_CONTEXTS)
        return self._model.tokenizer.encode(text, add_special_tokens=False)[: self._model.max_model_len]

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """The tokens of each word, at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}") if text.strip()]
        return self._model.tokenizer.encode_batch(texts, add_special_tokens=False)

    def _chat(self, request: ChatRequest, given: list[list[int]] | None) -> list[list[int]]:
        """`given` is the prompt as a gateway rendered and tokenized it."""
        _check_given(given, 1)
        keep_last = request.truncate_prompt_tokens
        if given is None:
            text = render(self._model.chat_template, request)
            given = self._tokenize([text], keep_last, "messages", add_special_tokens=False)
        return [self._model.fit_prompt(ids, keep_last=keep_last, param="messages") for ids in given]

    def _seeing_chat(self, request: ChatRequest, given: list[list[int]] | None, images: ImagesByUrl) -> PlacedPrompt:
        served, read = self._model.check_sees("messages"), _shown(request, images)
        if given is not None:
            raise InvalidRequest("prompt_ids: cannot go with images", param="prompt_ids")
        if request.truncate_prompt_tokens is not None:
            raise UnsupportedParameter(
                "truncate_prompt_tokens: cannot go with images, which nobody can cut", param="truncate_prompt_tokens"
            )
        text = self._text_of(request, read)
        self._model.check_prompt_tokens(sum(image.layout.num_tokens for image in read), "messages")
        (ids,) = self._tokenize([text], None, "messages", add_special_tokens=False)
        self._model.check_prompt_tokens(num_placed(len(ids), read), "messages")
        self._model.fit_prompt(ids, keep_last=None, param="messages")
        return placed(ids, read, served.placeholder_id)

    def _text_of(self, request: ChatRequest, read: Sequence[ReadImage]) -> str:
        """Text of the prompt, with placeholders for its images."""
        if not read:
            return render(self._model.chat_template, request)
        placeholder = self._model.check_sees("messages").processor.placeholder
        text = render_with_images(self._model.chat_template, request, placeholder, len(read))
        return spelled_out(text, read, placeholder)

    def _fitting(self, request: ChatRequest, images: ImagesByUrl) -> ChatRequest:
        """The conversation without as many of its oldest turns as the context has no room for."""
        limit = self._model.max_model_len
        if self._num_tokens(request, limit, images) < limit:
            return request
        room = min(request.output_limit() or _ROOM, limit // 4)
        shorter = without_oldest(request, lambda one: self._num_tokens(one, limit, images) <= limit - room)
        return shorter if shorter is not None else request  # what is too long even so is refused as ever

    def _num_tokens(self, request: ChatRequest, limit: int, images: ImagesByUrl) -> int:
        """Tokens of the prompt; more than the limit where that can be told without counting, or rendering."""
        num_characters = sum(len(message.content) for message in request.messages if isinstance(message.content, str))
        longest = self._model.tokenizer.max_token_bytes
        if len(request.messages) > limit or (longest is not None and num_characters > limit * longest):
            return limit + 1
        read = _shown(request, images)
        text = self._text_of(request, read)
        try:
            self._model.check_prompt_text(text, "messages")
        except ContextLengthExceeded:
            return limit + 1
        return num_placed(self._model.tokenizer.count([text], add_special_tokens=False)[0], read)

    def _completion(self, request: CompletionRequest, given: list[list[int]] | None) -> list[list[int]]:
        prompts = request.prompts(self._model.config.vocab_size, self._model.tokenizer.fill_in)
        _check_given(given, len(prompts))
        prompts = [*given] if given else prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        keep_last = request.truncate_prompt_tokens
        encoded = iter(self._tokenize(texts, keep_last, "prompt", add_special_tokens=True))
        found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self._model.fit_prompt(ids, keep_last=keep_last, param="prompt") for ids in found]

    def _echoed(self, request: CompletionRequest, prompts: list[list[int]]) -> list[str]:
        echoed = [self._model.tokenizer.decode(prompt_ids) for prompt_ids in prompts]
        if sum(map(len, echoed)) * request.num_choices() > _MAX_ECHOED:
            raise InvalidRequest(
                f"echo: the prompts of all choices have more than {_MAX_ECHOED} characters", param="echo"
            )
        return echoed

    def _tokenize(
        self, texts: list[str], keep_last: int | None, param: str, *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Texts that cannot fit are refused before they are tokenized, or else before there are ids, unless cut."""
        for text in texts:
            self._model.check_prompt_text(text, param, contexts=1 if keep_last is None else MAX_CONTEXTS)
        check = None if keep_last is not None else partial(self._model.check_prompt_tokens, param=param)
        return self._model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens, check=check)

    def _count(self, chat: ChatRequest, images: ImagesByUrl) -> int:
        read = _shown(chat, images)
        text = self._text_of(chat, read)
        self._model.check_prompt_text(text, "messages", contexts=MAX_CONTEXTS)
        (count,) = self._model.tokenizer.count([text], add_special_tokens=False)
        return num_placed(count, read)


def _shown(chat: ChatRequest, images: ImagesByUrl) -> list[ReadImage]:
    """The images of a chat, in its order."""
    return [images[asked.url, asked.is_low] for asked in chat.images()]


def _check_unbarred(wanted: ChatRequest | CompletionRequest, asked: GuideAsked) -> None:
    """A guide may leave one token, which must not be one that cannot come."""
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(wanted, name):
            raise InvalidRequest(f"{name}: cannot go with {asked.param}: nothing might be left", param=name)


def _check_given(given: list[list[int]] | None, num_prompts: int) -> None:
    if given is not None and len(given) != num_prompts:
        raise InvalidRequest(f"prompt_ids: expected {num_prompts} lists, got {len(given)}", param="prompt_ids")


def _check_choices(n: int, prompts: list[list[int]], *, max_open: int) -> None:
    """Refuses what would take too much to build: each choice is a request to the engine, with a prompt of its own."""
    num_choices = len(prompts) * n
    if num_choices > max_open:
        raise InvalidRequest(f"{num_choices} choices; this server generates at most {max_open} at a time")
    num_tokens = sum(map(len, prompts)) * n
    if num_tokens > _MAX_PROMPT_TOKENS and num_choices > 1:
        raise InvalidRequest(
            f"n: the prompts of {num_choices} choices have {num_tokens} tokens together; this server takes at most "
            f"{_MAX_PROMPT_TOKENS} in a request of several choices",
            param="n",
        )
