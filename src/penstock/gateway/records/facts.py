"""The facts of one request that is over, as the recorder, the logs, the traces and the monitor are told them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.api.errors import http_error
from penstock.core.errors import PenstockError
from penstock.gateway.records.trace import PassedOn, StepVisit, Trace


class Ending(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # by the gateway, or by a replica that says the request is wrong
    FAILED = "failed"
    CLIENT_GONE = "client_gone"


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """One request, over. Times are in seconds from its arrival; None: it did not get so far."""

    id: str
    surface: str
    ending: Ending
    reason: str = ""  # of what is not ok; from a fixed set, never a client's words
    tenant: str = ""
    key_id: str = ""
    model: str = ""
    replica: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None  # of streams
    total_s: float | None = None
    num_tries: int = 0
    rule: str = ""  # what sent it to this model, where that is for rules to say
    parts: bytes = b""  # of the time to the first token, as the replica said: `api.server_timing`
    route: str = ""  # the model that was asked for; `model` is the pool that this led to
    cost: float | None = None  # None: it has no price
    trace: Trace | PassedOn | None = None
    device_s: float | None = None  # what it took, as its replica measured it; None: it did not say
    kv_block_s: float | None = None
    fingerprint: str = ""  # of a request that was put into quarantine
    is_batch: bool = False  # a row of a batch: nobody waits for it, and no objective is for it
    step_of: str = ""  # the request of a pipeline that this is a step of
    steps: tuple[StepVisit, ...] = ()  # a pipeline's attempts; their tokens and cost are also recorded by themselves
    version: str = ""  # that answered, as name@version, whatever it is made of; empty: the model has no versions

    @property
    def series(self) -> str:
        """The name that it counts under: of a version that is no pool of its own the version's."""
        return self.version or self.model


def ending_of(error: PenstockError) -> tuple[Ending, str]:
    """How a request ended that was answered with this error, and why."""
    is_ours = http_error(error).status >= 500
    return Ending.FAILED if is_ours else Ending.REFUSED, error.reason or error.code
