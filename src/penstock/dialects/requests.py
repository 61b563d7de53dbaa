"""A client's request as one kind of server is sent it: the fields it may have (`fields`), with the names it knows them
by, one output limit, and what the gateway adds.

A request of the gateway's own goes out untouched where a server wants nothing special. Servers that do not speak
OpenAI at all are `native`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple
from zlib import crc32

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.request import Priority
from penstock.dialects.dialect import Dialect
from penstock.dialects.fields import CHAT, COMPLETIONS, GENERATES, check_fields

Members = dict[str, msgspec.Raw]

_decode = msgspec.json.Decoder(Members).decode
_encode = msgspec.json.encode
_TRUE, _NULL = msgspec.Raw(b"true"), msgspec.Raw(b"null")
_USAGE = msgspec.Raw(b'{"include_usage":true}')
_LIMITS = ("max_completion_tokens", "max_tokens")  # the first that is set counts, as the gateway reserves by it
_MAX_SALT = 1024  # characters of a client's own


class Adapter(NamedTuple):
    name: str
    path: str = ""  # where the server finds it, for those that want to be told
    base: str = ""  # the model's name, for those that want that beside it


class RequestOptions(msgspec.Struct, frozen=True, gc=False):
    """Options that the gateway adds to a request. The default adds nothing."""

    priority: Priority = Priority.NORMAL
    salt: Callable[[str], str] | None = None  # of the cache, by the client's own salt: different ones never share
    request_id: str = ""
    adapter: Adapter | None = None
    usage: bool = False  # a stream shall end with what it used, though its client did not ask


NOTHING = RequestOptions()


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    body: bytes
    hides_usage: bool = False  # of a stream: its client did not ask for it


def needs_change(dialect: Dialect, options: RequestOptions) -> bool:
    """Whether the request has to be changed, told without opening it."""
    return bool(
        dialect.renamed
        or dialect.dropped
        or dialect.lists_stops
        or dialect.model
        or options.adapter
        or (options.usage and dialect.has_stream_usage)
        or (options.salt and dialect.salt)
        or (options.request_id and dialect.request_id)
        or (options.priority is not Priority.NORMAL and dialect.priority)
    )


def outgoing(dialect: Dialect, body: bytes, options: RequestOptions = NOTHING) -> bytes:
    """A request of the gateway's own as it goes out; the very same bytes where nothing differs."""
    return prepare(dialect, CHAT, body, options).body


def prepare(
    dialect: Dialect,
    path: bytes,
    body: bytes,
    options: RequestOptions = NOTHING,
    forward_fields: Collection[str] | None = None,
) -> Outgoing:
    """`forward_fields`: those that an operator allows clients besides; None: this is no client's request.

    Raises what is wrong with a client's. It is always written anew: what a client spells twice, the server reads once.
    """
    is_clients = forward_fields is not None
    if not is_clients and not needs_change(dialect, options):
        return Outgoing(body)
    try:
        members = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if is_clients:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None
        return Outgoing(body)  # what is wrong with it, the server will say
    if forward_fields is not None:
        check_fields(dialect, path, members, forward_fields)
    was = dict(members)
    if path in GENERATES and dialect.salt is not None and options.salt is not None:
        _add_salt(dialect.salt, options.salt, members)
    if path not in (CHAT, COMPLETIONS):
        return Outgoing(_encode(members))
    _keep_one_limit(members)
    for name, other in dialect.renamed.items():
        if name in members:
            value = members.pop(name)
            members.setdefault(other, value)
    for name in dialect.dropped:
        members.pop(name, None)
    if dialect.lists_stops and bytes(members.get("stop", b"")).startswith(b'"'):
        members["stop"] = msgspec.Raw(b"[%b]" % bytes(members["stop"]))
    _add(dialect, members, options)
    is_stream = members.get("stream") == _TRUE
    return Outgoing(
        body if members == was and not is_clients else _encode(members),
        hides_usage=is_stream and options.usage and not _asks_usage(was.get("stream_options")),
    )


def priority_of(dialect: Dialect, priority: Priority) -> int | None:
    """Returns the priority as its scheduler counts: from low numbers or from high ones. None: it has no such thing."""
    field = dialect.priority
    if field is None:
        return None
    return field.high * (Priority.NORMAL - priority)


def refuses_priority(dialect: Dialect, status: int, body: bytes) -> bool:
    """Whether a refusal says that the server does not schedule by priority: it must not be sent there again."""
    return dialect.priority is not None and 400 <= status < 500 and dialect.priority.refusal in body


def _add(dialect: Dialect, members: Members, options: RequestOptions) -> None:
    if dialect.model is not None:
        members["model"] = _raw(dialect.model)
    if dialect.priority is not None and (number := priority_of(dialect, options.priority)):
        members[dialect.priority.name] = _raw(number)
    if dialect.request_id is not None and options.request_id:
        members[dialect.request_id] = _raw(options.request_id)
    if options.adapter is not None and dialect.lora is not None:
        _select(members, dialect, options.adapter)
    if options.usage and dialect.has_stream_usage and members.get("stream") == _TRUE:
        members["stream_options"] = _with_usage(members.get("stream_options"))


def _add_salt(field: str, salt: Callable[[str], str], members: Members) -> None:
    own = members.get(field, _NULL)
    try:
        text = msgspec.json.decode(own, type=str | None) or ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"{field}: expected a string", param=field) from None
    if len(text) > _MAX_SALT:
        raise InvalidRequest(f"{field}: must have at most {_MAX_SALT} characters", param=field)
    members[field] = _raw(salt(text))


def _keep_one_limit(members: Members) -> None:
    """Two limits would leave it to the server which of them holds."""
    is_given = False
    for name in _LIMITS:
        if name in members:
            if is_given or members[name] == _NULL:
                del members[name]
            else:
                is_given = True


def _select(members: Members, dialect: Dialect, adapter: Adapter) -> None:
    assert dialect.lora is not None
    if adapter.base and dialect.lora.select != "model":
        members["model"] = _raw(adapter.base)
    match dialect.lora.select:
        case "model" | "lora_path" as member:
            members[member] = _raw(adapter.name)
        case "lora_request" as member:
            number = crc32(adapter.name.encode()) & 0x7FFFFFFF or 1
            members[member] = _raw({"lora_name": adapter.name, "lora_int_id": number, "lora_path": adapter.path})
        case None:
            pass


def _asks_usage(options: msgspec.Raw | None) -> bool:
    if options is None or bytes(options)[:1] != b"{":
        return False
    return _decode(bytes(options)).get("include_usage") == _TRUE


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    if options is None or bytes(options) == b"null":
        return _USAGE
    if bytes(options)[:1] != b"{":
        return options  # as wrong as it came
    return _raw(_decode(bytes(options)) | {"include_usage": _TRUE})


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))
