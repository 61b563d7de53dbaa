"""Fields of a request that the gateway reads: of its body, and of headers that are hints. A replica reads the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.api.classify import CLASSIFY_PATHS
from penstock.api.decoding import explain
from penstock.api.errors import ANTHROPIC, OPENAI, Convention
from penstock.api.oip.tensor_call import TENSORS_PATH, open_call, pack_call
from penstock.api.rerank import RERANK_PATHS, SCORE_PATHS
from penstock.api.tokenization import DETOKENIZE_PATHS, RENDER_PATH, TOKENIZE_PATHS
from penstock.core.errors import InvalidRequest

EXPECTED_OUTPUT = b"x-penstock-expected-output"
MAX_WAIT = b"x-penstock-max-wait"
_MAX_DIGITS = 9
_MAX_WAIT_S = 3600
MAX_NAME = 256  # characters of a model's name; no route has a longer one
_MAX_SESSION = 256  # characters; of a longer name its hash stands for it

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class RequestView(msgspec.Struct, frozen=True, dict=True):
    model: Annotated[str, Meta(max_length=MAX_NAME)]
    stream: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None  # of /v1/responses
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None  # of /v1/completions: so many are made, and n shown
    user: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()  # may make a template say anything
    reasoning_effort: msgspec.Raw = msgspec.Raw()  # likewise
    output_config: msgspec.Raw = msgspec.Raw()  # likewise, of /v1/messages
    reasoning: msgspec.Raw = msgspec.Raw()  # likewise, of /v1/responses
    prompt: msgspec.Raw = msgspec.Raw()  # of /v1/completions: there may be many
    messages: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()  # of /v1/messages
    instructions: msgspec.Raw = msgspec.Raw()  # of /v1/responses
    truncation: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()  # of /v1/embeddings: as a prompt; of /v1/responses: as messages
    query: msgspec.Raw = msgspec.Raw()  # of /v1/rerank
    documents: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()  # of /v1/score, with documents
    text_1: msgspec.Raw = msgspec.Raw()  # likewise, with text_2
    text_2: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()

    @property
    def output_limit(self) -> int | None:
        """Output limit of one choice, if the client set one."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens if self.max_tokens is not None else self.max_output_tokens

    @property
    def drops_turns(self) -> bool:
        """Whether the oldest turns may be left out of a prompt that is longer than the context."""
        return bytes(self.truncation) == b'"auto"'

    @property
    def choices_per_prompt(self) -> int:
        """Sequences that are made for each prompt, each as long as the output limit lets it."""
        n, best_of = self.n or 1, self.best_of or 1
        return n if n > best_of else best_of

    @cached_property
    def num_choices(self) -> int:
        return self.choices_per_prompt * _num_prompts(bytes(self.prompt))

    @cached_property
    def num_texts(self) -> int:
        """Number of texts of a request that generates nothing: each is a sequence of its own."""
        return sum(_num_prompts(bytes(part)) for part in (self.input, self.documents, self.text_2) if part)

    @property
    def paired_bytes(self) -> int:
        """Bytes of the text that each of these may be read together with."""
        return sum(len(bytes(one)) for one in (self.query, self.queries, self.text_1))

    @property
    def has_template_arguments(self) -> bool:
        given = (self.chat_template_kwargs, self.reasoning_effort, self.output_config, self.reasoning)
        return any(bytes(one) not in (b"", b"null") for one in given)

    @cached_property
    def session(self) -> str | None:
        """Requests that should meet the same cache and the same version; Anthropic's clients have a user_id."""
        name = self.prompt_cache_key or self.user or (_user_id(self.metadata) if self.metadata else None)
        if name is None or len(name) <= _MAX_SESSION:
            return name
        return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class Surface(msgspec.Struct, frozen=True):
    """One of the paths that need a replica: which clients speak it, and what they mean by saying nothing."""

    path: bytes
    name: str  # in metrics and logs
    convention: Convention
    default_output: int | None  # tokens, if the client sets no limit; None: as many as the context leaves
    last_event: bytes  # of a stream
    generates: bool = True  # it makes tokens; else numbers, of whole texts
    output_field: bytes = b"max_tokens"  # of the body, that limits the output
    is_metered: bool = True  # its tokens are limited and charged; else it is a request of no tokens: no engine works


RESPONSES = b"/v1/responses"
TENSORS = TENSORS_PATH.encode()


def _unmetered(path: str, name: str, convention: Convention = OPENAI) -> Surface:
    return Surface(path.encode(), name, convention, 0, b"}", generates=False, is_metered=False)


SURFACES = {
    surface.path: surface
    for surface in (
        Surface(b"/v1/chat/completions", "chat/completions", OPENAI, None, b"data: [DONE]"),
        Surface(b"/v1/completions", "completions", OPENAI, 16, b"data: [DONE]"),
        Surface(b"/v1/messages", "messages", ANTHROPIC, None, b"event: message_stop"),
        Surface(RESPONSES, "responses", OPENAI, None, b'"usage":{', output_field=b"max_output_tokens"),
        Surface(b"/v1/embeddings", "embeddings", OPENAI, 0, b'"usage"', generates=False),
        Surface(b"/v1/rerank", "rerank", OPENAI, 0, b'"usage"', generates=False),
        Surface(b"/v1/score", "score", OPENAI, 0, b'"usage"', generates=False),
        Surface(CLASSIFY_PATHS[0].encode(), "classify", OPENAI, 0, b'"usage"', generates=False),
        _unmetered(TOKENIZE_PATHS[0], "tokenize"),
        _unmetered(DETOKENIZE_PATHS[0], "detokenize"),
        _unmetered(RENDER_PATH, "chat/completions/render"),
        _unmetered("/v1/messages/count_tokens", "messages/count_tokens", ANTHROPIC),
        _unmetered(TENSORS_PATH, "tensors"),
    )
}
UNMETERED = frozenset(path for path, surface in SURFACES.items() if not surface.is_metered)

# Other paths that clients know them by: replicas are asked at the first.
for _first, *_others in (RERANK_PATHS, SCORE_PATHS, CLASSIFY_PATHS, TOKENIZE_PATHS, DETOKENIZE_PATHS):
    SURFACES |= {other.encode(): SURFACES[_first.encode()] for other in _others}

_NO_ANSWER: dict[str, None] = dict.fromkeys(
    ("stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
)
_decoder = msgspec.json.Decoder(RequestView)
_metadata = msgspec.json.Decoder(_Metadata)
_MAX_TEXTS = 2048  # in one request, as OpenAI has it
_SHORT_BYTES = 64 << 10  # of a list, up to which it is simply decoded
_MAX_SCANNED = 100_000  # strings, brackets and what is between them
_parts_of = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]|[^"\[\]{}]+', re.DOTALL).finditer


def read(body: bytes) -> RequestView:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(error, RequestView) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def prepare(path: bytes, body: bytes) -> RequestView:
    """`read`, and all that is asked of it later and grows with the body: for a thread that may take a while."""
    if path == TENSORS:
        return RequestView(open_call(body).call.model)
    view = read(body)
    if not SURFACES[path].is_metered:  # what its answer would be like, if there was one, makes no difference
        view = msgspec.structs.replace(view, **_NO_ANSWER)
    _ = view.session
    if path == b"/v1/completions":
        _ = view.num_choices
    elif path != RESPONSES and (view.input or view.documents or view.text_2):  # its input is a conversation
        _ = view.num_texts
    return view


def with_model(body: bytes, model: str) -> bytes:
    """The client's request for a model that is known to its replicas by another name; nothing else is read."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    return msgspec.json.encode(members | {"model": msgspec.Raw(msgspec.json.encode(model))})


def with_tensor_model(body: bytes, model: str) -> bytes:
    """The same of a call about tensors."""
    call, tensors = open_call(body)
    return pack_call(msgspec.structs.replace(call, model=model), tensors)


def with_output_limit(body: bytes, limit: int, field: bytes = b"max_tokens") -> bytes:
    """The client's bytes with a limit where it set none. It goes last, so it counts though the client wrote null."""
    end = body.rindex(b"}")
    comma = b"" if body[:end].rstrip()[-1:] == b"{" else b","
    return b'%b%b"%b":%d}' % (body[:end], comma, field, limit)


def _user_id(metadata: msgspec.Raw) -> str | None:
    """None: there is none, or it is no text."""
    try:
        return _metadata.decode(metadata).user_id if bytes(metadata)[:1] == b"{" else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _num_prompts(prompt: bytes) -> int:
    """A list of token ids is one prompt; one of texts, or of lists of ids, is many."""
    if prompt[:1] != b"[":
        return 1
    if len(prompt) > _SHORT_BYTES:
        return _num_in_long_list(prompt)
    parts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    return _checked(max(1, sum(bytes(part).lstrip()[:1] in (b'"', b"[", b"{") for part in parts)))


def _num_in_long_list(prompt: bytes) -> int:
    """The count is made without an object for each: there may be millions, and then they are not counted to the end."""
    if prompt[1:64].lstrip()[:1] not in (b'"', b"[", b"{"):
        return 1  # of token ids
    depth, commas = 0, 0
    for number, part in enumerate(_parts_of(prompt)):
        text = part[0]
        if text in (b"[", b"{"):
            depth += 1
        elif text in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and text[:1] != b'"':
            commas = _checked(commas + text.count(b","))
        if number > _MAX_SCANNED:
            raise InvalidRequest("a list has too many parts")
    return _checked(commas + 1)


def _checked(num_texts: int) -> int:
    if num_texts > _MAX_TEXTS:
        raise InvalidRequest(f"more than {_MAX_TEXTS} prompts or texts in one request")
    return num_texts


def expected_output(headers: Mapping[bytes, bytes]) -> int | None:
    """Tokens of one answer; None: it does not say."""
    said = headers.get(EXPECTED_OUTPUT)
    if said is None:
        return None
    said = said.strip()
    if not said.isdigit() or len(said) > _MAX_DIGITS or not int(said):
        name = EXPECTED_OUTPUT.decode()
        raise InvalidRequest(f"{name}: expected a number of tokens, 1 or more", param=name)
    return int(said)


def max_wait_s(said: bytes) -> float:
    """Seconds that a request may wait for a place, or for a replica, as its client has said."""
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _MAX_WAIT_S:
        name = MAX_WAIT.decode()
        raise InvalidRequest(f"{name}: expected a number of seconds, 0 to {_MAX_WAIT_S}", param=name)
    return seconds
