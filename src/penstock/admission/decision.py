"""Decisions of admission: admit to a replica, wait here, or a refusal that says why and when to come back."""

from __future__ import annotations

import enum

import msgspec

from penstock.router.request import EdgeRequest
from penstock.router.router import Choice


class ShedReason(enum.StrEnum):
    NO_REPLICA = "no_replica"  # none of the model's replicas takes work now
    NOT_LOADED = "not_loaded"  # the model shares its device with others, and is not to be loaded; `detail` says why
    TOO_LARGE = "too_large"  # prompt and output limit fit no replica; to come back does not help
    QUEUE_FULL = "queue_full"
    KV_TIGHT = "kv_tight"
    TOO_SLOW = "too_slow"  # it would wait longer than its deadline, or than the objective makes sense of
    DISPLACED = "displaced"  # it waited, and gave its place to a tenant that asks for less
    DEADLINE = "deadline"  # it waited until its deadline


class Admit(msgspec.Struct, frozen=True):
    request: EdgeRequest
    choice: Choice
    replica_id: str
    waited_s: float
    predicted_ttft_s: float  # from arrival: the wait here included


class Queued(msgspec.Struct, frozen=True):
    request: EdgeRequest
    position: int  # in its class, counting from 1
    predicted_wait_s: float
    is_held: bool = False  # for want of any replica


class Shed(msgspec.Struct, frozen=True):
    request: EdgeRequest
    reason: ShedReason
    retry_after_s: float | None  # None: to come back does not help
    detail: str = ""
    is_expected: bool = False  # a replica, by then


Decision = Admit | Queued | Shed
