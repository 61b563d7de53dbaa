"""Refusals: when waiting makes no sense, and when to come back instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from penstock.admission.decision import Shed, ShedReason
from penstock.admission.ledger import expected_cost
from penstock.admission.queue import ModelQueue
from penstock.admission.settings import AdmissionSettings
from penstock.core.replica import ReplicaSnapshot
from penstock.router.filters import that_fit_context
from penstock.router.request import EdgeRequest

MIN_RETRY_S = 1.0
NOT_LOADED_RETRY_S = 30.0  # an operator may load the model by then
_MANY = 256  # sequences side by side, of a replica that does not say how many it takes
_RECOVERY_S = 5.0  # when to ask again for a model that no replica serves now


def dead_end(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], dropped: Mapping[str, str]) -> Shed:
    """None of the replicas takes it now; is there one that ever could?"""
    if replicas and not that_fit_context(request, replicas, 0.0):
        return Shed(request, ShedReason.TOO_LARGE, None)
    return Shed(request, ShedReason.NO_REPLICA, _RECOVERY_S, ", ".join(sorted(set(dropped.values()))))


def why_not_wait(
    request: EdgeRequest,
    queue: ModelQueue,
    usable: Sequence[ReplicaSnapshot],
    settings: AdmissionSettings,
    wait_s: float,
    patience_s: float,
) -> ShedReason | None:
    """The reason to refuse it now. When KV is tight, low classes, long contexts and long outputs are the first to go,
    and small requests the last: it is not for them that others wait."""
    rules = settings.classes[request.priority]
    # A cache is full at most: what one request would fill in many turns is no reason to refuse the others.
    asked = queue.kv_tokens + sum(min(replica.kv_used_tokens, replica.limits.kv_capacity_tokens) for replica in usable)
    capacity = sum(replica.limits.kv_capacity_tokens for replica in usable)
    bearable = rules.kv_pressure * _standing(request, request.kv_tokens * len(usable) / capacity, settings)
    if asked / capacity > bearable:
        return ShedReason.KV_TIGHT
    if wait_s > patience_s:
        return ShedReason.TOO_SLOW
    if queue.length(request.priority) >= rules.max_length:
        return ShedReason.QUEUE_FULL
    return None


def _standing(request: EdgeRequest, share: float, settings: AdmissionSettings) -> float:
    """A factor on the KV pressure that it is refused at; `share`: what it fills of a replica's KV."""
    if share >= settings.long_context or request.max_tokens >= settings.long_output_tokens:
        return 0.5
    return settings.small_pressure if share <= settings.small_context else 1.0


def retry_after_s(wait_s: float, clear_s: float, patience_s: float) -> float:
    """Returns when the line has become half as long, and still is one: the other half is for errors.

    `wait_s` counts the places already kept for others, so each refusal tells a later time than the last.
    """
    return max(MIN_RETRY_S, wait_s - min(clear_s, patience_s) / 2)


def first_guess(request: EdgeRequest, usable: Sequence[ReplicaSnapshot]) -> float:
    """Cost per second that such requests leave the queue with, by the replicas' speeds, before any was seen to.

    They will run side by side. What is known is how long a step takes with those that run now; with as many as there
    is room for it takes longer, though less than in proportion: by the square root, which errs on the slow side.
    """
    amount = expected_cost(request)
    rate = 0.0
    for replica in usable:
        running = max(1, replica.load.num_running)
        places = min(replica.max_sequences, replica.limits.kv_capacity_tokens // request.kv_tokens, _MANY)
        token_s = 1.0 / (replica.decode_tokens_per_s * math.sqrt(max(1.0, places / running)))
        rate += amount / (request.prompt_tokens / replica.prefill_tokens_per_s + request.output_tokens * token_s)
    return rate
