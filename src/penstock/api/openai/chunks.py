"""Answers in pieces: the chunks of one streamed response, as bytes ready for `api/sse.py`.

A chunk goes out for every token of every stream, so what never changes is encoded once per response, and a chunk costs
the encoding of its text and one concatenation. Both kinds are written the same way: `start` each choice, `text` as it
comes, `finish` each choice, and `usage` at the end if the client asked for it. A chat's chunks may hold calls of tools
too: each is told with `call`, and then its `arguments` as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.api.openai.responses import (
    Call,
    Finish,
    ResponseHead,
    ScoredToken,
    TextOffsets,
    Usage,
    call_object,
    chat_logprobs,
    completion_logprobs,
    encode,
    envelope,
)

UsageNow = Callable[[], Usage]


class _Frame:
    """The bytes around the choice of a chunk: constant, unless each is to tell the usage up to there."""

    def __init__(self, head: ResponseHead, kind: str, include_usage: bool, usage_now: UsageNow | None) -> None:
        self.prefix = encode(envelope(head, kind))[:-1] + b',"choices":['
        # Every chunk has the key if include_usage is set, and all but the last say null.
        self._suffix = b'],"usage":null}' if include_usage else b"]}"
        self._usage_now = usage_now

    @property
    def suffix(self) -> bytes:
        return self._suffix if self._usage_now is None else b'],"usage":%b}' % encode(self._usage_now())

    @property
    def opening(self) -> bytes:
        """The suffix of a chunk that says nothing yet: tokens that are there already come with the next."""
        if self._usage_now is None:
            return self._suffix
        now = self._usage_now()
        reasoning = 0 if now.completion_tokens_details is not None else None
        prompt = now.prompt_tokens_details
        before = Usage.of(now.prompt_tokens, 0, prompt.cached_tokens, reasoning, prompt.image_tokens)
        return b'],"usage":%b}' % encode(before)

    def usage(self, usage: Usage) -> bytes:
        return b'%b],"usage":%b}' % (self.prefix, encode(usage))


class ChatChunks:
    """chat.completion.chunk objects."""

    def __init__(self, head: ResponseHead, *, include_usage: bool = False, usage_now: UsageNow | None = None) -> None:
        self._frame = _Frame(head, "chat.completion.chunk", include_usage, usage_now)

    def resume(self, index: int, before: bytes) -> None:
        """The tokens that come next are scored after the text of others; here nobody asks where."""

    def start(self, index: int, text: str | None = "", prompt_ids: Sequence[int] | None = None) -> bytes:
        """`text` is None where there may be calls instead of one; `prompt_ids`: if they are to be told."""
        delta = b'{"role":"assistant","content":%b}' % encode(text)
        chunk = self._chunk(index, delta, suffix=self._frame.opening)
        return chunk if prompt_ids is None else b'%b,"prompt_token_ids":%b}' % (chunk[:-1], encode(prompt_ids))

    def ids(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Ids of the tokens that the next chunks are made of, where they are to be told."""
        return self._chunk(index, b"{}", more=b',"token_ids":%b' % encode(token_ids))

    def text(self, index: int, text: str, logprobs: Sequence[ScoredToken] | None = None) -> bytes:
        return self._chunk(index, b'{"content":%b}' % encode(text), _scored(logprobs))

    def thought(self, index: int, text: str, logprobs: Sequence[ScoredToken] | None = None) -> bytes:
        """Chunk of reasoning text, under DeepSeek's name, which most clients read, and vLLM's."""
        encoded = encode(text)
        delta = b'{"reasoning_content":%b,"reasoning":%b}' % (encoded, encoded)
        return self._chunk(index, delta, _scored(logprobs))

    def call(self, index: int, number: int, call: Call, logprobs: Sequence[ScoredToken] | None = None) -> bytes:
        """`number` is of the call, among those of its choice."""
        delta = {"tool_calls": [{"index": number, **call_object(call)}]}
        return self._chunk(index, encode(delta), _scored(logprobs))

    def arguments(self, index: int, number: int, text: str, logprobs: Sequence[ScoredToken] | None = None) -> bytes:
        delta = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (number, encode(text))
        return self._chunk(index, delta, _scored(logprobs))

    def finish(self, index: int, reason: Finish) -> bytes:
        return self._chunk(index, b"{}", finish=encode(reason))

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        finish: bytes = b"null",
        more: bytes = b"",
        suffix: bytes | None = None,
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._frame.prefix,
            index,
            delta,
            logprobs,
            finish,
            more,
            self._frame.suffix if suffix is None else suffix,
        )


def _scored(logprobs: Sequence[ScoredToken] | None) -> bytes:
    return b"null" if logprobs is None else encode(chat_logprobs(logprobs))


class CompletionChunks:
    """text_completion objects, which serve as chunks too."""

    def __init__(self, head: ResponseHead, *, include_usage: bool = False, usage_now: UsageNow | None = None) -> None:
        self._frame = _Frame(head, "text_completion", include_usage, usage_now)
        self._text_offsets: dict[int, TextOffsets] = {}  # of the scored tokens of each choice

    def resume(self, index: int, before: bytes) -> None:
        """The tokens that come next are scored after the text of others."""
        self._text_offsets[index] = TextOffsets(before)

    def start(self, index: int, prompt_ids: Sequence[int] | None = None) -> bytes | None:
        """None: nothing is to be told before the text; `prompt_ids`: if they are."""
        if prompt_ids is None:
            return None
        return self._chunk(
            index, b'""', more=b',"prompt_token_ids":%b' % encode(prompt_ids), suffix=self._frame.opening
        )

    def ids(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Ids of the tokens that the next chunks are made of, where they are to be told."""
        return self._chunk(index, b'""', more=b',"token_ids":%b' % encode(token_ids))

    def text(self, index: int, text: str, logprobs: Sequence[ScoredToken] | None = None) -> bytes:
        scored = b"null" if logprobs is None else self._score(index, logprobs)
        return self._chunk(index, encode(text), scored)

    def finish(self, index: int, reason: Finish) -> bytes:
        return self._chunk(index, b'""', finish=encode(reason))

    def usage(self, usage: Usage) -> bytes:
        return self._frame.usage(usage)

    def _score(self, index: int, tokens: Sequence[ScoredToken]) -> bytes:
        return encode(completion_logprobs(tokens, self._text_offsets.setdefault(index, TextOffsets())))

    def _chunk(
        self,
        index: int,
        text: bytes,
        logprobs: bytes = b"null",
        finish: bytes = b"null",
        more: bytes = b"",
        suffix: bytes | None = None,
    ) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._frame.prefix,
            index,
            text,
            logprobs,
            finish,
            more,
            self._frame.suffix if suffix is None else suffix,
        )
