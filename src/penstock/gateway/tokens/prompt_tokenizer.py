"""Tokenizer of one model's prompts at a gateway: how many tokens a request's prompt has, or at most can have, and under
which names a replica's cache holds its beginning.

It is made of what a replica of the model hands over (`api.model_text`), and counts as that replica does, because both
parse with `api` and render with `text`. It blocks: who must not wait asks from a thread. What it remembers belongs to
the tenant whose namespace it is told, and within that to the client's own salt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from penstock.api.anthropic import parse_messages
from penstock.api.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from penstock.api.openai.chat import ImageAsked
from penstock.api.openai.embeddings import parse_embedding
from penstock.api.responses import parse_responses
from penstock.api.tokenizer_bundle import TokenizerBundle
from penstock.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from penstock.core.hashing import ROUTING_TOKENS, cache_namespace, chain_routing, routing_root
from penstock.core.replica import UNBOUNDED
from penstock.gateway.tokens.memo import Memo
from penstock.images.prompt import num_placed, placed, spelled_out
from penstock.images.reading import ImageReader, ReadImage, named
from penstock.images.source import data_bytes, is_data
from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import kept_ids, num_kept, render, render_with_images
from penstock.text.tokenizer import Tokenizer

_LONG = 4096  # characters; a shorter text is counted faster than its beginning is looked up
_BATCH_CHARS = 1 << 20  # of several texts that are tokenized at a time
_TURNS = 32  # how many turns back a conversation is looked for
_MIN_LONGEST = 32  # bytes of a token: some normalizers drop a few spaces
_REMEMBERED = 10_000  # of each kind: about 2 MB
_NAMED, _NAMED_BYTES = 2_000, 64 << 20  # the same, where ids are kept too: of 8k tokens about 40 kB

# Signs that a body holds tools, or may: letters can be escaped. One after the other is ten times as fast as a pattern.
_TOOL_SIGNS = (b'"tools"', b'"tool_calls"', b'"tool_use"', b'_call"', b'_call_output"', rb"\u006", rb"\u007")

# Signs that a body shows images. A body that hides them behind escaped letters has the last two signs above.
_IMAGE_SIGNS = (b'"image_url"', b'"input_image"', b'"image"')
_MAX_PIXELS = 1 << 31  # its replica may take fewer
# Assumed size of an image whose bytes only its replica fetches: some pixels, as images of the web have.
_UNSEEN = (1024, 1024)

CHAT, COMPLETION, MESSAGES = b"/v1/chat/completions", b"/v1/completions", b"/v1/messages"
EMBEDDINGS, RESPONSES = b"/v1/embeddings", b"/v1/responses"
_PARSERS: dict[bytes, Callable[[bytes], ChatRequest | CompletionRequest]] = {
    CHAT: parse_chat,
    COMPLETION: parse_completion,
    MESSAGES: lambda body: parse_messages(body).to_chat(),
    RESPONSES: lambda body: parse_responses(body).to_chat(),
}


class HashedPrompt(NamedTuple):
    """A prompt that was tokenized."""

    num_tokens: int
    hashes: tuple[int, ...] = ()  # of its routing blocks, if it is one prompt: `core.hashing`
    ids: bytes = b""  # of one prompt, in JSON without its brackets; empty: the client sent ids, or several prompts


class _Start(NamedTuple):
    """Beginning of a conversation, as far as it is known."""

    num_tokens: int
    hashes: tuple[int, ...]
    rest: list[int]  # ids after the last whole block
    ids: bytes  # all, as in `HashedPrompt`


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Vocabulary:
    """A model's tokenizer and template, and what is measured of them once. Pools of the same model share it."""

    tokenizer: Tokenizer
    template: ChatTemplate
    max_token_bytes: int
    divider: str | None
    overhead: int
    images: ImageReader | None  # None: the model takes none
    placeholder_id: int  # id of the token that stands for an image


_vocabularies: WeakValueDictionary[str, _Vocabulary] = WeakValueDictionary()  # in use, by digest


class PromptTokenizer:
    def __init__(self, text: TokenizerBundle, digest: str) -> None:
        """Takes a while for a large vocabulary, unless another pool has the same. `digest` names what is in `text`."""
        self.digest = digest
        self._shared = shared = _vocabularies.get(digest) or _vocabularies.setdefault(digest, _measured(text))
        self._tokenizer, self._template = shared.tokenizer, shared.template
        self._max_token_bytes, self._divider, self._overhead = shared.max_token_bytes, shared.divider, shared.overhead
        self._growth = shared.tokenizer.growth
        self._images, self._placeholder_id = shared.images, shared.placeholder_id
        self.max_context = UNBOUNDED  # of its replicas, in tokens: a text that is surely longer is not tokenized
        self._vocab_size = text.vocab_size
        self._bos_token_id = text.bos_token_id
        self._counts = Memo[int](_REMEMBERED)  # of whole requests: who was refused comes back with the same
        self._prefixes = Memo[int](_REMEMBERED)  # of conversations up to their last turn
        self._names = Memo[HashedPrompt](_NAMED, _NAMED_BYTES)
        self._starts = Memo[_Start](_NAMED, _NAMED_BYTES)  # of conversations up to their last turn

    def bound(self, body: bytes, sees: bool | None = None) -> int:
        """Never less than `count`, and found at once; UNBOUNDED where this model's template allows none, or where tools
        may be told of, since nothing says how a template writes them, or images shown. `sees`: `may_see`, if it is
        known."""
        if any(sign in body for sign in _TOOL_SIGNS) or (self.may_see(body) if sees is None else sees):
            return UNBOUNDED
        if self._growth > 1 and (not body.isascii() or b"\\u" in body):
            return len(body) * self._growth + self._overhead
        return len(body) + self._overhead

    @staticmethod
    def may_see(body: bytes) -> bool:
        """Whether a request may show images. Their bytes say nothing of their tokens."""
        return b"image" in body and any(sign in body for sign in _IMAGE_SIGNS)

    def count(self, path: bytes, body: bytes, tenant: str = "") -> int:
        """Number of the prompt's tokens, as a replica counts. Raises what it would: InvalidRequest. `tenant`: its
        namespace."""
        key = blake2b(path + body, digest_size=16).digest()
        known = self._counts.get(tenant, key)
        if known is None:
            known = self._count_texts(body) if path == EMBEDDINGS else self._count(_PARSERS[path](body), tenant)
            self._counts.put(tenant, key, known)
        return known

    def names(self, path: bytes, body: bytes, tenant: str, adapter: str = "") -> HashedPrompt:
        """Prompt as a replica would tokenize and hash it in the tenant's namespace. Raises as `count` does."""
        key = self._name_key(path, body, adapter)
        known = self._names.get(tenant, key)
        if known is None:
            known = self._name(_PARSERS[path](body), tenant, adapter)
            self._names.put(tenant, key, known, len(known.ids))
        return known

    def known_names(self, path: bytes, body: bytes, tenant: str, adapter: str = "") -> HashedPrompt | None:
        """Returns what `names` would, if that is remembered: found at once."""
        return self._names.get(tenant, self._name_key(path, body, adapter))

    @staticmethod
    def _name_key(path: bytes, body: bytes, adapter: str) -> bytes:
        return blake2b(b"%b %b\0%b" % (path, adapter.encode(), body), digest_size=16).digest()

    def _count_texts(self, body: bytes) -> int:
        request = parse_embedding(body)
        inputs = request.inputs(self._vocab_size)
        texts = self._checked([one for one in inputs if isinstance(one, str)])
        lengths = self._lengths(texts)
        lengths += [len(one) for one in inputs if not isinstance(one, str)]
        keep = request.truncate_prompt_tokens or 0
        return sum(min(length, keep) if keep > 0 else length for length in lengths)

    def _checked(self, texts: Sequence[str]) -> Sequence[str]:
        """Before they are tokenized, which takes some hundred bytes for each token: no token is longer than the
        longest, so of a long text it can be said without counting that no context holds it."""
        most = self.max_context * self._max_token_bytes
        longest = max(map(len, texts), default=0)
        if longest > most:
            raise ContextLengthExceeded(
                f"a text of {longest} characters has more tokens than the {self.max_context} of the longest context"
            )
        return texts

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        """Batch by batch: all at once would take memory for all."""
        found, start, num_chars = list[int](), 0, 0
        for end, text in enumerate(texts, 1):
            num_chars += len(text)
            if num_chars >= _BATCH_CHARS or end == len(texts):
                found += self._tokenizer.count(texts[start:end], add_special_tokens=True)
                start, num_chars = end, 0
        return found

    # -- naming

    def _name(self, request: ChatRequest | CompletionRequest, tenant: str, adapter: str) -> HashedPrompt:
        namespace = cache_namespace(tenant, request.cache_salt or "")
        root = routing_root(namespace, adapter=adapter)
        keep_last, is_text = request.truncate_prompt_tokens, True
        if isinstance(request, ChatRequest) and (asked := request.images()):
            return self._name_seeing(request, asked, root)
        if isinstance(request, ChatRequest):
            text = render(self._template, request)
            self._checked([text])
            if keep_last is None and text:
                return self._name_text(text, root, namespace)
            ids, param = self._tokenizer.encode(text, add_special_tokens=False), "messages"
        else:
            prompts, param = request.prompts(self._vocab_size, self._tokenizer.fill_in), "prompt"
            if len(prompts) > 1:
                return HashedPrompt(self._count(request, tenant))
            (prompt,) = prompts
            is_text = isinstance(prompt, str)
            self._checked([prompt] if isinstance(prompt, str) else [])
            ids = self._tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        kept = kept_ids(ids, keep_last=keep_last, bos_token_id=self._bos_token_id, param=param)
        return HashedPrompt(len(kept), tuple(chain_routing(root, kept)), _written(kept) if is_text else b"")

    def _name_seeing(self, request: ChatRequest, asked: Sequence[ImageAsked], root: int) -> HashedPrompt:
        """Its replica is sent no ids: it needs the images. Nothing is named from the first image on that only the
        replica will see."""
        read, unseen = self._read_images(asked)
        text = self._text_with(request, read)
        self._checked([text])
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        whole = placed(ids, read, self._placeholder_id)
        keyed = whole.keyed_ids()
        if unseen < len(read):
            keyed = keyed[: whole.tiles[unseen][0].start]
        return HashedPrompt(len(whole.ids), tuple(chain_routing(root, keyed)))

    def _read_images(self, asked: Sequence[ImageAsked]) -> tuple[list[ReadImage], int]:
        """Images by their headers, and the place of the first whose header is not here. Raises InvalidImage for what
        no replica takes."""
        if self._images is None:
            raise UnsupportedParameter(f"{asked[0].path}: this model takes no images", param=asked[0].path)
        found: dict[tuple[str, bool], ReadImage] = {}
        for image in asked:
            key = (image.url, image.is_low)
            if key not in found:
                with named(image.path):
                    if is_data(image.url):
                        found[key] = self._images.read(data_bytes(image.url, len(image.url)), is_low=image.is_low)
                    else:
                        found[key] = self._images.unseen(*_UNSEEN, is_low=image.is_low)
        unseen = next((at for at, image in enumerate(asked) if not is_data(image.url)), len(asked))
        return [found[image.url, image.is_low] for image in asked], unseen

    def _text_with(self, request: ChatRequest, read: Sequence[ReadImage]) -> str:
        assert self._images is not None
        placeholder = self._images.placeholder
        return spelled_out(render_with_images(self._template, request, placeholder, len(read)), read, placeholder)

    def _name_text(self, text: str, root: int, namespace: str) -> HashedPrompt:
        """A conversation that has grown by a turn is tokenized from where it was the last time."""
        ends = self._turns(text) if len(text) >= _LONG else []
        start, known_end, names = _Start(0, (), [], b""), 0, _digests(text, ends, root)
        for name, end in zip(reversed(names), reversed(ends), strict=True):
            if (found := self._starts.get(namespace, name)) is not None:
                start, known_end = found, end
                break
        last_end = ends[-1] if ends else 0
        parts = [text[known_end:last_end], text[last_end:]]
        middle, last = self._tokenizer.encode_batch(parts, add_special_tokens=False)
        if ends:
            start = _grown(start, middle, root)
            self._starts.put(namespace, names[-1], start, len(start.ids))
        whole = _grown(start, last, root)
        return HashedPrompt(whole.num_tokens, whole.hashes, whole.ids)

    # -- counting

    def _count(self, request: ChatRequest | CompletionRequest, tenant: str = "") -> int:
        if isinstance(request, ChatRequest) and (asked := request.images()):
            read, _ = self._read_images(asked)
            (text,) = self._checked([self._text_with(request, read)])
            return num_placed(self._tokenizer.count([text], add_special_tokens=False)[0], read)
        if isinstance(request, ChatRequest):
            namespace = cache_namespace(tenant, request.cache_salt or "")
            (text,) = self._checked([render(self._template, request)])
            param, counts = "messages", [self._count_text(text, namespace)]
        else:
            param, counts = "prompt", self._count_prompts(request)
        return num_kept(counts, keep_last=request.truncate_prompt_tokens, bos_token_id=self._bos_token_id, param=param)

    def _count_prompts(self, request: CompletionRequest) -> list[int]:
        prompts = request.prompts(self._vocab_size, self._tokenizer.fill_in)
        texts = self._checked([prompt for prompt in prompts if isinstance(prompt, str)])
        counts = iter(self._lengths(texts))
        return [next(counts) if isinstance(prompt, str) else len(prompt) for prompt in prompts]

    def _count_text(self, text: str, namespace: str = "") -> int:
        """A conversation that has grown by a turn is counted from where it was the last time."""
        ends = self._turns(text) if len(text) >= _LONG else []
        if not ends:
            return self._tokenizer.count([text], add_special_tokens=False)[0]
        names = _digests(text, ends)
        known, known_end = 0, 0
        for name, end in zip(reversed(names), reversed(ends), strict=True):
            if (found := self._prefixes.get(namespace, name)) is not None:
                known, known_end = found, end
                break
        parts = [text[known_end : ends[-1]], text[ends[-1] :]]
        middle, last = self._tokenizer.count(parts, add_special_tokens=False)
        self._prefixes.put(namespace, names[-1], known + middle)
        return known + middle + last

    def _turns(self, text: str) -> list[int]:
        """Where the last turns begin."""
        divider, found, end = self._divider, list[int](), len(text)
        if divider is not None:
            while len(found) < _TURNS and (end := text.rfind(divider, 0, end)) > 0:
                found.append(end)
        return found[::-1]


def _measured(text: TokenizerBundle) -> _Vocabulary:
    tokenizer = Tokenizer.from_json(text.tokenizer, text.special_tokens)
    template = ChatTemplate(
        text.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tool_format=text.tool_format,
        reasoning_format=text.reasoning_format,
    )
    divider = tokenizer.divider(_example(template))
    images, placeholder_id = None, -1
    if text.images is not None:
        images = ImageReader(text.images, max_pixels=_MAX_PIXELS)
        found = tokenizer.added_id(images.placeholder)
        placeholder_id = -1 if found is None else found
    longest, overhead = _longest_token(tokenizer), _most_overhead(tokenizer, template)
    return _Vocabulary(tokenizer, template, longest, divider, overhead, images, placeholder_id)


def _example(template: ChatTemplate) -> str:
    """A conversation, so that the token which begins each turn is seen; empty if the model cannot chat."""
    try:
        return render(template, parse_chat(_chat("user", "assistant", "user")))
    except InvalidRequest:
        return ""


def _most_overhead(tokenizer: Tokenizer, template: ChatTemplate) -> int:
    """Number of tokens by which a prompt may exceed the bytes of its request: a template may bring words of its own.

    They are brought once: where more messages or longer ones make it more, nothing bounds the template.
    """
    overheads = [_overhead_of(tokenizer, template, bodies) for bodies in (_SHORT, _MANY, _WIDE)]
    return UNBOUNDED if max(overheads[1:]) > overheads[0] else overheads[0]


def _overhead_of(tokenizer: Tokenizer, template: ChatTemplate, bodies: Iterable[bytes]) -> int:
    most = 0
    for body in bodies:
        try:
            text = render(template, parse_chat(body))
        except InvalidRequest:
            continue  # not every template takes every conversation
        most = max(most, tokenizer.count([text], add_special_tokens=False)[0] - len(body))
    return most


def _digests(text: str, ends: Sequence[int], root: int = 0) -> list[bytes]:
    """Returns the digests of the text up to each end."""
    hasher, start, found = blake2b(root.to_bytes(8, "little"), digest_size=16), 0, []
    for end in ends:
        hasher.update(text[start:end].encode(errors="surrogatepass"))
        found.append(hasher.digest())
        start = end
    return found


def _longest_token(tokenizer: Tokenizer) -> int:
    return max(_MIN_LONGEST, *(len(tokenizer.token_bytes(number)) for number in range(tokenizer.vocab_size)))


def _grown(start: _Start, ids: list[int], root: int) -> _Start:
    rest = start.rest + ids
    fresh = chain_routing(start.hashes[-1] if start.hashes else root, rest)
    written = b",".join(filter(None, (start.ids, _written(ids))))
    return _Start(
        start.num_tokens + len(ids), start.hashes + tuple(fresh), rest[len(fresh) * ROUTING_TOKENS :], written
    )


def _written(ids: list[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]


def _chat(*roles: str, content: str = "") -> bytes:
    """The shortest request for such a conversation."""
    messages = ",".join(f'{{"role":"{role}","content":{json.dumps(content, ensure_ascii=False)}}}' for role in roles)
    return f'{{"model":"m","messages":[{messages}]}}'.encode()


_SHORT = [_chat("user"), _chat("system", "user"), _chat("system"), _chat("assistant"), _chat("tool")]
_MANY = [_chat(*["user", "assistant"] * 50), _chat(*["user"] * 100), _chat("system", *["tool"] * 100)]
_WIDE = [_chat("user", content="".join(map(chr, range(0x20, 0x2FF))) * 3)]  # about a token for every byte
