"""A prompt that one server computes and another answers, as the engines say it to each other in requests.

    params    vLLM: the first server is asked for one token; its answer names its KV blocks, and these
              `kv_transfer_params` go into the request to the second, which pulls them
    room      SGLang: both servers are sent the same request at the same time, with a room at the first one's
              bootstrap server in which they meet; the first pushes its KV blocks to the second

Only bodies are written and read here, in the shapes that the engines publish. Who is sent what and when, and what
becomes of a server that fails, is for the gateway to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.dialects.dialect import Handover
from penstock.dialects.fields import CHAT, COMPLETIONS

ROOM_BITS = 63  # SGLang's rooms are signed 64-bit numbers, none of them negative
BOOTSTRAP_PORT = 8998  # of SGLang's prefill servers, if nobody says otherwise

_PARAMS = "kv_transfer_params"
_ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_ONE = msgspec.Raw(b"1")

_Members = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(_Members).decode
_encode = msgspec.json.encode


class _Size(msgspec.Struct):
    """Fields that say how many sequences a request has, and whether it asks for its prompt back."""

    prompt: object = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    prompt_logprobs: object = None
    kv_transfer_params: object = None


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    """Members of a handover that the peer of a prefill server cannot do without."""

    do_remote_prefill: bool


_size = msgspec.json.Decoder(_Size).decode
_answer = msgspec.json.Decoder(_Answer).decode
_params = msgspec.json.Decoder(_Params).decode
_TO_PREFILL = msgspec.Raw(
    _encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)


def can_be_split(handover: Handover, path: bytes, body: bytes) -> bool:
    """Whether such servers can share this request. `params` are those of one sequence, and what is said of a prompt's
    own tokens is known only where it is computed; a room is numbered on for several sequences, but not for several
    prompts and several answers at once."""
    if path not in (CHAT, COMPLETIONS):
        return False
    try:
        size = _size(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    is_single, num_prompts = max(size.n or 1, size.best_of or 1) == 1, _num_prompts(size.prompt)
    if handover == "room":
        return num_prompts == 1 or (num_prompts > 1 and is_single)
    asks_of_prompt = size.echo or size.prompt_logprobs is not None
    return is_single and num_prompts == 1 and not asks_of_prompt and size.kv_transfer_params is None


def prefill_request(body: bytes) -> bytes:
    """A client's request as vLLM is sent it that is to compute the prompt for another: one token, and no stream."""
    members = _decode(body)
    members.pop("stream_options", None)  # refused where there is no stream
    members["max_tokens"] = _ONE
    for name in ("max_completion_tokens", "min_tokens"):  # a minimum above the limit would be refused
        if name in members:
            members[name] = _ONE
    members["stream"] = msgspec.Raw(b"false")
    members[_PARAMS] = _TO_PREFILL
    return _encode(members)


def params_in(answer: bytes) -> msgspec.Raw | None:
    """KV blocks as vLLM's answer to `prefill_request` tells of them; None: nothing that another could pull by. So it is
    of a server without a connector, and of a prompt whose first token was the answer's last."""
    try:
        found = _answer(answer).kv_transfer_params
        return found if _params(found).do_remote_prefill else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def with_params(body: bytes, params: msgspec.Raw) -> bytes:
    """A client's request as vLLM is sent it that is to pull the prompt's KV blocks."""
    return _encode(_decode(body) | {_PARAMS: params})


def is_error(answer: bytes) -> bool:
    """Whether a stream begins with what went wrong, after the server has said that all is well."""
    return answer.startswith(b'data: {"error"')


def with_room(body: bytes, host: str, port: int, room: int) -> bytes:
    """A client's request as both of SGLang's servers are sent it. `host`: of the prefill server, whose bootstrap server
    is at `port`; `room`: of ROOM_BITS bits, never the same twice."""
    members: Mapping[str, object] = _decode(body)
    count = _num_prompts(_size(body).prompt)
    host = f"[{host}]" if ":" in host else host
    if count == 1:
        return _encode({**members, **dict(zip(_ROOM, (host, port, room), strict=True))})
    rooms = [(room + index) & ((1 << ROOM_BITS) - 1) for index in range(count)]
    return _encode({**members, **dict(zip(_ROOM, ([host] * count, [port] * count, rooms), strict=True))})


def _num_prompts(prompt: object) -> int:
    """Prompts of a request: a text or a list of ids is one, a list of these as many as it has. A chat has one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)
