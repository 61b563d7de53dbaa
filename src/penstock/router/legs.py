"""The second leg of a pick: a replica that KV blocks of the prompt are pulled from, and whether that pays.

    prefix     it holds more of the prompt than the replica that answers, and hands that over
    prefill    it computes the prompt, whose blocks are pulled while it does
    moved      it drains, and has the KV of a stream that goes on elsewhere

Pure arithmetic over snapshots, in the seconds that `load` counts in. It knows neither an index nor a transfer; whoever
answers computes by itself what does not come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.router.load import Load
from penstock.router.request import EdgeRequest

Split = Literal["auto", "always", "never"]

PULL_OVERHEAD_S = 0.01  # of a pull, besides its tokens: a connection, a lookup at the source, the first block's way


class SourceReason(StrEnum):
    PREFIX = "prefix"
    PREFILL = "prefill"
    MOVED = "moved"


class Alone(StrEnum):
    """The reason why a replica that could pull KV blocks is given nobody to pull them from."""

    NEVER = "never"  # by the model's setting
    SHORT = "short_prompt"  # or one whose blocks nobody has hashed
    WARM = "warm_prefix"  # less than a routing block is missing
    NOBODY = "no_source"
    NO_GAIN = "no_gain"  # to compute it is as fast, or faster


class Held(NamedTuple):
    """Tokens of a prompt's beginning that a replica has."""

    tokens: int = 0
    on_host: int = 0  # of them, in its host memory only


class Source(msgspec.Struct, frozen=True, gc=False):
    replica: ReplicaSnapshot
    reason: SourceReason
    pulled_tokens: int
    computed_tokens: int  # by the source, for this prompt
    rest_tokens: int  # that are left for the replica that answers, in tokens computed
    ttft_s: float  # from when it is sent, over both legs
    gain_s: float  # against no source: of this request and of those that decode beside it, as load counts them

    @property
    def prefills(self) -> bool:
        """It is asked to compute what it does not have."""
        return self.reason is SourceReason.PREFILL


def choose_source(
    request: EdgeRequest,
    picked: ReplicaSnapshot,
    peers: Iterable[ReplicaSnapshot],
    held: Mapping[str, Held],
    load: Load,
    now: float,
    split: Split = "auto",
) -> Source | Alone:
    """The source that saves `picked` most, if one saves anything. `peers`: other replicas of its model. With `always`
    the fastest that computes prompts for others, gain or not; so for a replica that can do nothing alone."""
    if picked.needs_peer:
        return _fastest(request, picked, peers, held, load, now)
    if split == "never":
        return Alone.NEVER
    own = held.get(picked.id, Held())
    missing = request.prompt_tokens - own.tokens
    is_short = not request.hashes and split == "auto"
    if missing < 2 or is_short or (own.tokens and missing <= request.block_tokens):
        return Alone.SHORT if is_short or not own.tokens else Alone.WARM
    found = []
    for peer in peers:
        if not can_pull(picked, peer) or not _is_allowed(request, peer):
            continue
        has = held.get(peer.id, Held())
        if has.tokens > own.tokens and split == "auto" and picked.pulls_prefixes and _has_blocks(peer, now):
            found.append(_prefix(request, picked, peer, own, has, load))
        if (split == "always" or _is_apart(picked, peer)) and _computes_prompts(request, peer, now):
            found.append(_prefill(request, picked, peer, own, has, load))
    if not found:
        return Alone.NOBODY
    if split == "always":
        return min(found, key=lambda source: source.ttft_s)
    best = max(found, key=lambda source: source.gain_s)
    return best if best.gain_s > 0.0 else Alone.NO_GAIN


def _fastest(
    request: EdgeRequest,
    picked: ReplicaSnapshot,
    peers: Iterable[ReplicaSnapshot],
    held: Mapping[str, Held],
    load: Load,
    now: float,
) -> Source | Alone:
    """Peers that compute prompts for `picked`, which must be sent to one of them, however short or warm."""
    own = held.get(picked.id, Held())
    own = own if own.tokens < request.prompt_tokens - 1 else Held()
    found = [
        _prefill(request, picked, peer, own, held.get(peer.id, Held()), load)
        for peer in peers
        if can_pull(picked, peer) and _is_allowed(request, peer) and _computes_prompts(request, peer, now)
    ]
    return min(found, key=lambda source: source.ttft_s) if found else Alone.NOBODY


def moved_source(
    picked: ReplicaSnapshot, origin: ReplicaSnapshot, known_tokens: int, own: Held, load: Load
) -> Source | None:
    """A replica that drains, as the source of a stream of so many tokens that it gave back; None: it cannot be one."""
    if origin.state is not ReplicaState.DRAINING or not (picked.pulls_prefixes and can_pull(picked, origin)):
        return None
    pulled = max(1, known_tokens - 1 - own.tokens)
    leg_s = PULL_OVERHEAD_S + pulled / picked.kv_pull_tokens_per_s
    return _source(SourceReason.MOVED, picked, origin, known_tokens, own, pulled, 0, leg_s, 0.0, load)


def can_pull(picked: ReplicaSnapshot, peer: ReplicaSnapshot) -> bool:
    """Whether blocks can go from `peer` to `picked` at all."""
    layout = picked.kv_layout
    is_equal = layout != "" and layout == peer.kv_layout
    return is_equal and picked.kv_address != "" and peer.kv_address != "" and peer.id != picked.id


def _is_allowed(request: EdgeRequest, peer: ReplicaSnapshot) -> bool:
    return not peer.is_tripped and (request.allowed is None or peer.id in request.allowed)


def _is_apart(picked: ReplicaSnapshot, peer: ReplicaSnapshot) -> bool:
    """Roles set the two apart. Of replicas with both roles the pick is by the same load the best for a prompt and its
    answer: another would delay its own answers as much, and those that compute for it would answer less and less."""
    return peer.role == "prefill" or picked.role == "decode"


def _has_blocks(peer: ReplicaSnapshot, now: float) -> bool:
    """The index can be believed of this replica: it reports, and may drain meanwhile."""
    return peer.state in (ReplicaState.READY, ReplicaState.DRAINING) and now <= peer.fresh_until


def _computes_prompts(request: EdgeRequest, peer: ReplicaSnapshot, now: float) -> bool:
    limits, tokens = peer.limits, request.prompt_tokens
    return (
        peer.role != "decode"
        and peer.state is ReplicaState.READY
        and now <= peer.fresh_until
        and peer.id not in request.avoid
        and tokens <= limits.max_model_len
        and tokens <= limits.kv_capacity_tokens
        and (not request.adapter or request.adapter in peer.adapters)
    )


def _prefix(
    request: EdgeRequest, picked: ReplicaSnapshot, peer: ReplicaSnapshot, own: Held, has: Held, load: Load
) -> Source:
    pulled = has.tokens - own.tokens
    fetch_s = min(pulled, has.on_host) * peer.host_share / peer.prefill_tokens_per_s
    leg_s = fetch_s + PULL_OVERHEAD_S + pulled / picked.kv_pull_tokens_per_s
    tokens = request.prompt_tokens
    return _source(SourceReason.PREFIX, picked, peer, tokens, own, pulled, 0, leg_s, 0.0, load)


def _prefill(
    request: EdgeRequest, picked: ReplicaSnapshot, peer: ReplicaSnapshot, own: Held, has: Held, load: Load
) -> Source:
    """Chunks are computed and pulled as in a pipeline of two stages: the slower one takes its whole time, and the other
    one chunk's."""
    tokens = request.prompt_tokens
    pulled, computed = tokens - 1 - own.tokens, max(1, tokens - has.tokens)
    prefill_s = (computed + peer.host_share * has.on_host) / peer.prefill_tokens_per_s
    pull_s = pulled / picked.kv_pull_tokens_per_s
    chunks = math.ceil(computed / (peer.limits.chunk_tokens or computed))
    pipeline_s = max(prefill_s, pull_s) + min(prefill_s, pull_s) / chunks
    leg_s = PULL_OVERHEAD_S + pipeline_s
    # Answers that are under way at the source wait as those of the replica that answers would. A replica with the role
    # prefill has none: what runs there are prompts, which its queue counts.
    delay_s = 0.0 if peer.role == "prefill" else load.output * peer.load.num_running * prefill_s
    return _source(SourceReason.PREFILL, picked, peer, tokens, own, pulled, computed, leg_s, delay_s, load)


def _source(
    reason: SourceReason,
    picked: ReplicaSnapshot,
    peer: ReplicaSnapshot,
    tokens: int,
    own: Held,
    pulled: int,
    computed: int,
    leg_s: float,
    delay_s: float,
    load: Load,
) -> Source:
    """`leg_s`: of the pull and what it waits for, a queue aside; it passes while the request waits where it is
    answered. `delay_s`: of others at the source, as load counts it. All answers beside a prefill wait as long as it
    takes."""
    queue_s = peer.queue_s if computed else 0.0
    fetched = own.on_host * picked.host_share  # of its own host memory, in tokens computed
    rest = tokens - own.tokens - pulled + fetched
    rest_s, alone_s = rest / picked.prefill_tokens_per_s, (rest + pulled) / picked.prefill_tokens_per_s
    beside = 1.0 + load.output * picked.load.num_running
    alone = load.queue * picked.queue_s + alone_s * beside
    apart = max(load.queue * picked.queue_s, load.queue * queue_s + leg_s) + rest_s * beside + delay_s
    ttft_s = max(picked.queue_s, queue_s + leg_s) + rest_s
    return Source(peer, reason, pulled, computed, max(1, round(rest)), ttft_s, alone - apart)
