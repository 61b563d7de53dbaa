"""Streams that another replica can carry on: what a replica writes between its events, and what a gateway makes of it.

A relayed stream is an ordinary SSE stream with comments in blocks of their own, which clients skip as they skip
keep-alives:

    : {"id":"5ad0…","created":1760000000,"seed":7,…}        once, first: the origin
    data: {…}                                               events that need no token: the opening
    : [0,[1024,17],96]                                      a unit: choice, token ids, and once per prompt its
    data: {…}                                                 tokens found in the cache; then the events that come of it
    : cost 0.0125 3.5                                       before the end, or before the next: what was used here
    : carry on: draining                                    instead of an end: the replica gives the stream back

An answer that its client wants as a whole is relayed in the same form where the gateway asks for that: an empty event
after every few tokens, and the whole answer as its last event.

A unit and the events after it belong together: their text follows from the ids of all units so far, and an id whose
text is held back comes with a later unit. So a cut stream is resumed from its units alone and the number of events that
followed the last one; the next replica goes through the last unit again and leaves those events out.

Nothing here knows a dialect: it sees blocks, and the bytes of a client's request as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.core.request import Cost, KvSource, Priority

HEADER = "x-penstock"  # from a gateway: one of the two
STREAM = "stream"  # the body is the client's; a streamed answer is to be relayed
ENVELOPE = "envelope"  # the body is an `Envelope`, and the answer is to be relayed
WHOLE_HEADER = "x-penstock-whole"  # from a gateway: an answer that is not streamed is to be relayed, too
SECRET_HEADER = "x-penstock-secret"
SECRET_VARIABLE = "PENSTOCK_GATEWAY_SECRET"  # where a replica and the gateway that started it have it from
NAMESPACE_HEADER = "x-penstock-namespace"  # from a gateway: whose prefixes these are, and nobody else's
WATERMARK_HEADER = "x-penstock-watermark"  # from a gateway: the name of what its tenant's answers are marked with
TENANT_HEADER = "x-penstock-tenant"  # from a gateway: a `Tenancy`
KV_SOURCE_HEADER = "x-penstock-kv-source"  # from a gateway: a `KvSource`, as host:port or host:port;prefill
GIVE_BACK_PATH = "/v1/penstock/give_back"  # from a gateway to a replica that drains: a `GiveBack`
COST_HEADER = "x-penstock-cost"  # to a gateway, of an answer that is not streamed: as in the comment

TokenIds = list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
_PREFILL = "prefill"
_CARRY_ON = b": carry on: "
_COST = b": cost "
_MAX_COST_S = 1e12  # what says more of one request is no measurement, and no store could hold a few of them
_WHOLE_TOKENS = 16  # in a unit of an answer that is not streamed
_PROGRESS = b"data: {}\n\n"
_LAST_READS = 4  # what a replica says at last is in one of these


class Tenancy(NamedTuple):
    """Tenant of a request, the weight of its share of a replica, and how urgent its requests are at most."""

    id: str = ""
    weight: float = 1.0
    priority: Priority | None = None  # None: as each request says

    def priority_of(self, asked: Priority | None) -> Priority:
        """Priority of a request, by its own wish: it may be less urgent than its tenant's others, but not more."""
        if self.priority is None:
            return Priority.NORMAL if asked is None else asked
        return self.priority if asked is None else max(self.priority, asked)


class Origin(msgspec.Struct, frozen=True):
    """Values that the first replica chose and every next one keeps."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]  # of the answer, without what its dialect puts before it
    created: int  # Unix seconds
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # for a request that has none of its own
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0  # as they were counted


_origin_decoder = msgspec.json.Decoder(Origin)


class Unit(msgspec.Struct, frozen=True, array_like=True):
    choice: Annotated[int, Meta(ge=0)]
    token_ids: TokenIds
    cached_tokens: int = 0


class Resume(msgspec.Struct, frozen=True):
    """Progress of a stream, from which the next replica resumes it."""

    origin: Origin
    units: list[Unit] = []  # those of which the client has at least one event
    num_events: Annotated[int, Meta(ge=0)] = 0  # that the client has since the last unit, or since the start

    def outputs(self) -> dict[int, list[int]]:
        """The ids so far, by choice."""
        found: dict[int, list[int]] = {}
        for unit in self.units:
            found.setdefault(unit.choice, []).extend(unit.token_ids)
        return found


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: msgspec.Raw  # as the client sent it
    prompt_ids: Annotated[list[Annotated[TokenIds, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    resume: Resume | None = None


class GiveBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Streams to be ended here, since another replica will carry them on."""

    ids: list[str]  # of their origins


_envelopes = msgspec.json.Decoder(Envelope)
_give_backs = msgspec.json.Decoder(GiveBack)
_units = msgspec.json.Decoder(list[Unit])
_encode = msgspec.json.Encoder().encode


def open_envelope(body: bytes) -> Envelope:
    try:
        envelope = _envelopes.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"this is not a gateway's envelope: {error}") from None
    if envelope.resume is not None and envelope.resume.units and not envelope.resume.num_events:
        raise InvalidRequest("resume.num_events: the last unit has no event, so it is not to be listed")
    return envelope


def read_give_back(body: bytes) -> GiveBack:
    try:
        return _give_backs.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected the ids of streams: {error}") from None


def read_tenant(value: str) -> Tenancy:
    """Tenant that a value of `TENANT_HEADER` names. Raises InvalidRequest."""
    try:
        name, weight, priority = value.split(" ")
        tenant = Tenancy(name, float(weight), Priority(int(priority)))
    except ValueError:
        tenant = None
    if tenant is None or not 0 < tenant.weight < inf:
        raise InvalidRequest(f"{TENANT_HEADER}: expected a name, a weight above 0 and a class of 0 to 2") from None
    return tenant


def read_kv_source(value: str) -> KvSource:
    """The source that `KV_SOURCE_HEADER` names. Raises InvalidRequest."""
    address, _, mode = value.partition(";")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16) or mode not in ("", _PREFILL):
        raise InvalidRequest(f"{KV_SOURCE_HEADER}: expected host:port, or host:port;{_PREFILL}")
    return KvSource(address, mode == _PREFILL)


def write_kv_source(source: KvSource) -> str:
    return f"{source.address};{_PREFILL}" if source.prefills else source.address


# -- the replica writes


def origin_comment(origin: Origin) -> bytes:
    return b": %b\n\n" % _encode(origin)


def carry_on_comment(error: PenstockError) -> bytes:
    return b"%b%b\n\n" % (_CARRY_ON, error.code.encode())


def cost_value(cost: Cost) -> bytes:
    return b"%.9g %.6g" % (cost.device_s, cost.kv_block_s)


def cost_comment(cost: Cost) -> bytes:
    return b"%b%b\n\n" % (_COST, cost_value(cost))


class UnitWriter:
    """Joins events with the ids they come of, leaving out the first `num_sent` events: the client has them."""

    def __init__(self, num_sent: int = 0) -> None:
        self._num_sent = num_sent
        self._held: dict[int, tuple[list[int], int]] = {}  # per choice: ids that no event speaks of yet, cached tokens

    def known(self, events: Sequence[bytes]) -> bytes:
        """Events that come of no token, or of those of a unit that was sent already."""
        skipped = min(self._num_sent, len(events))
        self._num_sent -= skipped
        return b"".join(events[skipped:])

    def unit(self, choice: int, token_ids: list[int], cached_tokens: int, events: Sequence[bytes]) -> bytes:
        if choice in self._held:
            held_ids, held_cached = self._held.pop(choice)
            token_ids, cached_tokens = held_ids + token_ids, held_cached + cached_tokens
        if not events:
            self._held[choice] = token_ids, cached_tokens
            return b""
        unit = (choice, token_ids, cached_tokens) if cached_tokens else (choice, token_ids)
        return b": %b\n\n%b" % (_encode(unit), b"".join(events))


class WholeWriter:
    """Units of an answer that its client gets as a whole: one for every few tokens of a choice."""

    def __init__(self) -> None:
        self._units = UnitWriter()
        self._held: dict[int, int] = {}  # tokens per choice

    def unit(self, choice: int, token_ids: list[int], cached_tokens: int) -> bytes:
        held = self._held.get(choice, 0) + len(token_ids)
        is_due = held >= _WHOLE_TOKENS
        self._held[choice] = 0 if is_due else held
        return self._units.unit(choice, token_ids, cached_tokens, (_PROGRESS,) if is_due else ())


# -- the gateway writes


def sealed(request: bytes, prompt_ids: bytes) -> bytes:
    """An envelope for a request that begins here, with its prompt as ids; both are JSON."""
    return b'{"request":%b,"prompt_ids":%b}' % (request, prompt_ids)


def tenant_value(tenant: Tenancy) -> bytes:
    """Value of `TENANT_HEADER` for a tenant."""
    return b"%b %.9g %d" % (tenant.id.encode(), tenant.weight, tenant.priority or 0)


# -- the gateway reads


def is_whole(end: bytes) -> bool:
    """Whether a relayed stream that has closed had come to its end; the last few of its blocks tell."""
    return not end[:-2].rpartition(b"\n\n")[2].startswith(_CARRY_ON)


def read_cost(value: bytes) -> Cost | None:
    """Cost that a value of `COST_HEADER` says; None: it is not such a value."""
    try:
        device_s, kv_block_s = map(float, value.split())
    except ValueError:
        return None
    return Cost(device_s, kv_block_s) if 0 <= device_s <= _MAX_COST_S and 0 <= kv_block_s <= _MAX_COST_S else None


def find_cost(end: bytes) -> Cost | None:
    """Cost of a stream at its last replica, which its last few blocks tell; None: they do not."""
    comment = (b"\n\n" + end).rpartition(b"\n\n" + _COST)[2]
    return read_cost(comment.partition(b"\n\n")[0]) if len(comment) < len(end) else None


class StreamRecord:
    """A relayed stream as far as a gateway has forwarded it: whole blocks, appended as they pass.

    Appending looks at nothing; every `fold_bytes` what came is folded into its units, about ten bytes a token.
    """

    def __init__(self, fold_bytes: int = 16 << 10) -> None:
        self._fold_bytes = fold_bytes
        self._origin = b""
        self._units = bytearray()  # of what was folded: JSON, each with a comma after it
        self._counted, self._counted_bytes = (0, 0), 0  # ids and cached tokens, and the part of the units they are in
        self._tail: list[bytes] = []
        self._fresh_bytes = 0  # since the last fold
        self.cost_elsewhere = Cost()  # of replicas that gave the stream back

    def append(self, blocks: bytes) -> None:
        self._tail.append(blocks)
        self._fresh_bytes += len(blocks)
        if self._fresh_bytes > self._fold_bytes:
            self._fold()

    @property
    def is_given_back(self) -> bool:
        """The replica has closed the stream in good order, but before its end."""
        blocks = self._blocks()
        return bool(blocks) and blocks[-1].startswith(_CARRY_ON)

    @property
    def prompt_tokens(self) -> int | None:
        """Number of prompt tokens as the replica counted them; None: it has not said so yet."""
        self._fold()
        return _origin_decoder.decode(self._origin).prompt_tokens if self._origin else None

    @property
    def stream_id(self) -> str | None:
        """The id that its replica knows it by; None: the replica has not said so yet."""
        self._fold()
        return _origin_decoder.decode(self._origin).id if self._origin else None

    @property
    def num_tokens(self) -> int:
        """Made for this stream, as far as it is known here."""
        return self.counts[0]

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens that were made and prompt tokens that came from a cache; for streams that end without a usage."""
        blocks = self._blocks()
        folded = _counts(bytes(self._units[self._counted_bytes :]))
        fresh = _counts(b",".join([block[2:] for block in blocks if block.startswith(b": [")]))
        made, cached = self._counted = self._counted[0] + folded[0], self._counted[1] + folded[1]
        self._counted_bytes = len(self._units)
        return made + fresh[0], cached + fresh[1]

    @property
    def cost(self) -> Cost | None:
        """Cost of the stream so far, by what its replicas said; None: nothing yet."""
        here, elsewhere = find_cost(b"".join(self._tail[-_LAST_READS:])), self.cost_elsewhere
        if here is None:
            return elsewhere if elsewhere != Cost() else None
        return here + elsewhere

    def envelope(self, request: bytes, prompt_ids: bytes = b"null") -> bytes | None:
        """Body to send to the next replica, whose answer goes on in this record; None if this is no relayed stream.

        `request` is the client's body and `prompt_ids` is JSON too.
        """
        blocks = self._blocks()
        while blocks and blocks[-1].startswith(b":"):
            block = blocks.pop()  # a unit without an event counts for nothing: the next replica says it again
            if block.startswith(_COST):
                self.cost_elsewhere += read_cost(block.removeprefix(_COST)) or Cost()
        self._tail = [block + b"\n\n" for block in blocks]
        if not self._origin:
            return None
        num_events = 0
        for block in blocks:
            if block.startswith(b": ["):
                num_events = 0
            elif not block.startswith(b":"):
                num_events += 1
        return b'{"request":%b,"prompt_ids":%b,"resume":{"origin":%b,"units":[%b],"num_events":%d}}' % (
            request,
            prompt_ids,
            self._origin,
            self._units_with(blocks),
            num_events,
        )

    def _blocks(self) -> list[bytes]:
        self._fold()
        return b"".join(self._tail).split(b"\n\n")[:-1]

    def _units_with(self, blocks: list[bytes]) -> bytes:
        units = [block[2:] for block in blocks if block.startswith(b": [")]
        return bytes(self._units + b",".join(units)).removesuffix(b",")

    def _fold(self) -> None:
        """Folds the tail into ids, up to the last unit but one: if the last has no event yet, the other one counts."""
        stream = b"".join(self._tail)
        if not self._origin and stream.startswith(b": {"):
            end = stream.index(b"\n\n")
            self._origin, stream = stream[2:end], stream[end + 2 :]
        # JSON has no raw newlines, so this stands nowhere but before a unit.
        parts = (b"\n\n" + stream).split(b"\n\n: [")
        if len(parts) > 3:
            self._units += b"".join([b"[%b," % part[: part.index(b"\n")] for part in parts[1:-2]])
            stream = b": [%b\n\n: [%b" % (parts[-2], parts[-1])
        self._tail, self._fresh_bytes = [stream], 0


def _counts(units: bytes) -> tuple[int, int]:
    """Ids and cached tokens in units with commas between or after them."""
    found = _units.decode(b"[%b]" % units.removesuffix(b","))
    return sum(len(unit.token_ids) for unit in found), sum(unit.cached_tokens for unit in found)
