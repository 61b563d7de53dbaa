"""Requests of clients, once they are tokens; and events that come back, token by token.

These types cross the engine's process boundary as msgpack. A request with n choices is n of these.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.core.guide import Guide
from penstock.core.images import ImageInput
from penstock.core.sampling import SamplingParams
from penstock.core.thinking import Thinking


class Priority(enum.IntEnum):
    """Scheduling classes; a lower number runs first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # the output limit or the end of the model's context
    ERROR = "error"


class AdapterRef(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A LoRA adapter, by what it is and by what clients call it."""

    digest: str  # of its content
    name: str


class KvSource(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Another replica that KV blocks of a prompt can be pulled from."""

    address: str  # host:port, of its KV transfer
    prefills: bool = False  # it is asked to compute what it does not have


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    id: str
    prompt_ids: list[int]
    max_tokens: int  # resolved: never more than the context leaves room for
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []  # end of sequence included, unless the client asked to ignore it
    min_tokens: int = 0  # stop tokens are masked until this many were generated
    priority: Priority = Priority.NORMAL
    namespace: str = ""  # prefix-cache isolation: part of every block hash
    output_ids: list[int] = []  # generated elsewhere: the answer goes on after them, as if they had been made here
    guide: Guide | None = None  # every token of the answer follows it
    adapter: AdapterRef | None = None  # None: the base model's own answer
    tenant: str = ""  # who shares the engine with whom: see `sched.fairness`
    weight: float = 1.0  # of the tenant's share among all that are here
    is_resumed: bool = False  # its client has a part of the answer from a replica that was lost: see `sched.ranking`
    kv_source: KvSource | None = None  # None: what is not cached here is computed here
    predicted_ids: list[int] = []  # text that its client expects in the answer: drafts may be taken from it
    # Images of the prompt, in its order; their tokens are in `prompt_ids`: see `core.images`.
    images: tuple[ImageInput, ...] = ()
    thinking: Thinking | None = None  # None: thoughts, if there are any, are as long as they are, and follow the guide

    def finish_after(self, num_generated: int, token_id: int) -> FinishReason | None:
        """Whether the answer ends with `token_id`, the last of `num_generated`, the output made elsewhere included."""
        if token_id in self.stop_token_ids and num_generated > self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_tokens else None


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The chosen token's log probability, and the most likely alternatives, best first."""

    logprob: float
    top: list[tuple[int, float]] = []


class RequestTimings(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Seconds spent in the engine, reported once with the first token."""

    queue_s: float  # from arrival in the engine to the first step that ran it, less `pull_s`
    prefill_s: float  # from there to the end of the step that made the first token
    pull_s: float = 0.0  # until the KV blocks that another engine was asked for had come, or would not
    pulled_tokens: int = 0  # that came
    is_pull_whole: bool = False  # all that was asked for did


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Resources used for a request, measured step by step: see `sched.cost`."""

    device_s: float = 0.0  # its share of the time the device worked
    kv_block_s: float = 0.0  # blocks of the KV cache that it held, times seconds

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.device_s + other.device_s, self.kv_block_s + other.kv_block_s)


class TokenEvent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """News of one request after one step: zero or more tokens, and perhaps its end."""

    request_id: str
    token_ids: list[int] = []
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None  # prompt tokens taken from the prefix cache; set with the first token made here
    timings: RequestTimings | None = None  # likewise
    error: str | None = None  # with FinishReason.ERROR: what went wrong
    error_code: str | None = None  # None: the engine failed; else the request itself is at fault
