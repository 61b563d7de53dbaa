"""Dialects: what there is to know of a kind of server, as data. Nothing here is done, only said."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

Join = Literal["sum", "max"]  # of many series: those of data-parallel ranks add up, but shares do not
Names = tuple[str, ...]
Handover = Literal["params", "room"]  # of a prompt's KV, between two servers (`handover`)


def names_in(text: str) -> frozenset[str]:
    """A table of many names, written as one text."""
    return frozenset(text.split())


class Signal(enum.StrEnum):
    """Numbers that a reading is made of. Totals only grow, from the server's start."""

    WAITING = "waiting"  # requests
    RUNNING = "running"
    WAITING_TOKENS = "waiting_tokens"  # of prompts, still to be computed
    MAX_RUNNING = "max_running"
    KV_USAGE = "kv_usage"  # 0 to 1
    KV_USED_TOKENS = "kv_used_tokens"
    KV_TOKENS = "kv_tokens"  # as many as there is room for
    KV_BLOCKS = "kv_blocks"  # the same, in blocks
    BLOCK_SIZE = "block_size"
    MAX_CONTEXT = "max_context"
    STEP_TOKENS = "step_tokens"  # the most a step carries
    IS_AWAKE = "is_awake"  # 0: its weights are not on the device
    DECODE_RATE = "decode_rate"  # tokens per second, of the whole batch
    STEPS = "steps"  # total
    PROMPT_TOKENS = "prompt_tokens"  # total
    PROMPTS = "prompts"  # total: how many of them
    PREFILL_TOKENS = "prefill_tokens"  # total: computed, and in how many seconds
    PREFILL_SECONDS = "prefill_seconds"
    DECODE_TOKENS = "decode_tokens"  # total: of all sequences, and in how many seconds of theirs
    DECODE_SECONDS = "decode_seconds"


class Series(msgspec.Struct, frozen=True):
    """A number of a Prometheus exposition, under the first of these names that is there."""

    names: Names  # the newest first
    labels: dict[str, str] = {}  # only series that have these
    join: Join = "sum"
    also: Names = ()  # joined to it, where they are there
    label: str | None = None  # the number is this label's text: so speak info metrics


class Member(msgspec.Struct, frozen=True):
    """A number of a JSON document: the way to it; "*" stands for every element. `true` counts one."""

    path: Names
    join: Join = "sum"


class Document(msgspec.Struct, frozen=True):
    """Something a server can be asked for that holds numbers: an exposition if they are series, else JSON."""

    path: bytes
    series: dict[Signal, Series] = {}
    members: dict[Signal, Member] = {}
    port: int | None = None  # if it is not the one that requests go to

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset(self.series or self.members)


class Health(msgspec.Struct, frozen=True):
    """The health path. Refused is gone, 200 is ready; what 503 means differs."""

    path: bytes = b"/health"
    deep: bytes | None = None  # makes a token; None: it is asked for a completion of one
    starting_header: tuple[bytes, bytes] | None = None  # on a 503: it is not dead, it loads
    starting_text: bytes | None = None  # the same, in the body
    has_503_while_starting: bool = False  # says so with nothing but the status: until it was ready once


class Overload(msgspec.Struct, frozen=True):
    """It works, and has no room now: another may."""

    statuses: tuple[int, ...] = (429, 503, 529)
    texts: tuple[bytes, ...] = ()  # in a body of any other error status


class PriorityField(msgspec.Struct, frozen=True):
    """Zero is normal everywhere. Sent only where the operator says that the server heeds it: others refuse it."""

    name: str
    high: int  # of a HIGH request; of a LOW one it is the opposite
    refusal: bytes  # is in the answer of a server that does not schedule by priority


class Lora(msgspec.Struct, frozen=True):
    select: Literal["model", "lora_path", "lora_request"] | None  # the member that names it; None: not by request
    load: bytes | None = None  # POST {lora_name, lora_path}
    unload: bytes | None = None  # POST {lora_name}


class Cancel(msgspec.Struct, frozen=True):
    """A closed connection ends the work everywhere, if the server looks. These look twice."""

    path: bytes
    member: str  # of the body: the request's id, or a list of ids
    is_list: bool = False


class Parking(msgspec.Struct, frozen=True):
    """Paths that make it give its device's memory back and take it again: POST, answered when that is done."""

    park: str
    wake: str
    needs: str  # with what it has to be started
    shows: str | None = None  # GET, answered only by one that was started so; None: there is no such path


class Native(msgspec.Struct, frozen=True):
    """A generate endpoint that is not OpenAI's: how a request is put, and where an answer's parts are."""

    whole: str  # path; {model} is replaced
    stream: str
    prompt: str  # the member that takes the text
    parameters: Names  # the way to the object that takes the rest; empty: the top level
    packed: str | None  # the member of that object that takes what was renamed as JSON text; None: it is not packed
    renamed: dict[str, str]  # OpenAI's member to its own; what is not named is not sent
    constants: dict[str, object]
    text: Names  # in a whole answer
    delta: Names  # in an event
    finish: Names | None = None
    prompt_tokens: Names | None = None
    prompt_tokens_header: bytes | None = None  # of a whole answer, where its body does not say
    output_tokens: Names | None = None
    stream_member: str | None = None  # says that the answer shall be a stream
    hidden: Names | None = None  # in an event: whether its text is not for readers
    stops_joined: bool = False  # it takes a single stop string


class Sign(msgspec.Struct, frozen=True):
    """A sign that tells a server: a text in its answer to a path, or in a header of any answer."""

    text: bytes
    path: str | None = None
    header: bytes | None = None


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    signs: tuple[Sign, ...] = ()
    loads: tuple[Document, ...] = ()  # what changes: the first that it knows is asked again and again
    facts: tuple[Document, ...] = ()  # what does not: each is asked once in a while
    max_sequences: int = 256  # if it does not say
    health: Health = Health()
    overload: Overload = Overload()
    renamed: dict[str, str] = {}  # members of OpenAI requests that go by another name here
    dropped: Names = ()  # and those it would refuse
    lists_stops: bool = False  # it takes a list of stop strings, and no single one
    # By path, members of a request that it would ignore, each with the values that ask for nothing: refused otherwise.
    lacks: dict[bytes, dict[str, tuple[object, ...]]] = {}
    fields: frozenset[str] = frozenset()  # of generating requests, beside those of `dialects.fields`
    model: str | None = None  # what it calls the one model it has; None: as everybody does
    salt: str | None = None  # the member that keeps tenants' caches apart
    request_id: str | None = None  # the member that takes the request's id
    has_stream_usage: bool = True  # stream_options.include_usage is heeded
    priority: PriorityField | None = None
    lora: Lora | None = None
    cancel: Cancel | None = None
    parking: Parking | None = None  # None: it cannot
    has_kv_events: bool = False  # publishes them over ZMQ, if it is told to
    handover: Handover | None = None  # how two of them share a request, if they are started for it; None: they cannot
    native: Native | None = None  # None: it speaks OpenAI

    @property
    def has_load(self) -> bool:
        """Whether it can say how busy it is. Of one that cannot, what was sent there is counted here."""
        return any(Signal.RUNNING in document.signals for document in self.loads)
