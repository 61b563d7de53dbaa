"""How busy a replica is, in the one unit that adds up over unequal replicas: seconds until a first token."""

from __future__ import annotations

from penstock.core.replica import ReplicaSnapshot
from penstock.router.request import EdgeRequest

_KV_WEIGHT_S = 0.15  # how strongly a nearly full KV cache repels; as the waiting time of a queue near saturation
_KV_FULL = 0.99


def expected_ttft_s(request: EdgeRequest, replica: ReplicaSnapshot) -> float:
    """Prefill and decode are counted apart: queued prompts by the prefill speed, running sequences as a step's time.

    Beyond its last place a replica frees one for every mean output that it decodes.
    """
    decode_speed = replica.decode_tokens_per_s
    seconds = (replica.prefill_queued + request.prompt_tokens) / replica.prefill_tokens_per_s
    seconds += replica.running / decode_speed
    excess = replica.sequences + 1 - replica.max_sequences
    if excess > 0:
        seconds += excess * replica.mean_output_tokens / decode_speed
    return seconds


def load_s(request: EdgeRequest, replica: ReplicaSnapshot) -> float:
    """The expected time, and a barrier that grows without bound as the KV cache fills."""
    used = replica.kv_used_tokens / replica.kv_capacity_tokens
    if used > _KV_FULL:
        used = _KV_FULL
    return expected_ttft_s(request, replica) + _KV_WEIGHT_S * used / (1.0 - used)
