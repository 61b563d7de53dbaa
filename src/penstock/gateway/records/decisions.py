"""Decision records that a gateway writes of its choices, so that another policy can be asked what it would have done.

    decisions.log     MAGIC, then blocks: a length of four bytes, and that much zlib over entries in msgpack
    decisions.log.1   the one before, and so on

An entry holds ids, sizes, scores and one-way hashes: no part of a prompt, an answer or a key. A request has a `Decided`
for each replica that it was sent to and an `Ended`, by the same id. New fields go last and have a default: what was
written before is read as well. Writing is for `decision_log`.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.measurements import EngineLoad, ServingLimits
from penstock.core.replica import HOST_SHARE, UNBOUNDED, ReplicaSnapshot
from penstock.core.request import Priority
from penstock.gateway.records.facts import RequestFacts
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.router.sticky import session_bucket

MAGIC = b"penstock.decisions.1\n"
NUM_FILES = 4
LENGTH = struct.Struct("<I")
_MAX_CANDIDATES = 16  # of one choice; of more, the best


class Seen(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A replica as it was when the choice was made: what scorers read, and how they scored it."""

    id: str
    matched: int  # of the prompt's first blocks
    total: float
    scores: list[float]  # in the order of `Decided.scorers`
    sequences: int
    max_sequences: int
    prefill_queued: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    mean_output_tokens: float
    running: int
    kv_used_tokens: float
    kv_capacity_tokens: int
    age_s: float  # of the numbers
    share: float
    step_tokens: int = 2048
    on_host: int = 0  # of the matched blocks, in its host memory only
    host_share: float = HOST_SHARE
    steps: int = 0  # of its engine since its start

    def snapshot(self, model: str, now: float = 0.0) -> ReplicaSnapshot:
        """Snapshot as a policy would be shown it, from `now` on."""
        growth = self.prefill_queued + self.running * self.mean_output_tokens / 2
        return ReplicaSnapshot(
            id=self.id,
            models=(model,),
            taken_at=now - self.age_s,
            limits=ServingLimits(
                max_num_seqs=self.max_sequences,
                chunk_tokens=self.step_tokens,
                max_model_len=UNBOUNDED,
                kv_capacity_tokens=self.kv_capacity_tokens,
            ),
            load=EngineLoad(
                num_waiting=max(0, self.sequences - self.running),
                num_running=self.running,
                queued_tokens=self.prefill_queued,
                kv_active_tokens=round(self.kv_used_tokens - growth),
                steps=self.steps,
            ),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_tokens_per_s=self.decode_tokens_per_s,
            mean_output_tokens=self.mean_output_tokens,
            share=self.share,
            host_share=self.host_share,
            sent_sequences=min(0, self.sequences - self.running),  # ended since it last said how many run
        )


class Decided(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="d"):
    """A choice. A request that is sent elsewhere has several."""

    at_s: float  # since 1970
    id: str
    model: str
    tenant: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    expected_output: int
    has_session: bool
    hashes: bytes  # eight bytes for each routing block of the prompt
    block_tokens: int
    strategy: str
    scorers: list[str]
    picked: str | None
    is_approximate: bool
    num_candidates: int
    candidates: list[Seen]
    dropped: dict[str, str]
    draw: float = 0.0  # all the chance there was in it
    session: float | None = None  # a number that is the session's alone, and does not tell it
    route: str = ""  # the model that was asked for; `model` is the pool that this led to
    version: str = ""  # of a model that has several
    rule: str = ""  # that fired, and where it leads, if the model is chosen by rules: as in x-penstock-rule
    source: str = ""  # the replica that KV blocks of the prompt are pulled from
    why: str = ""  # a `SourceReason`, or why there is no source; empty: its replica could not pull any
    pulled_tokens: int = 0
    gain_s: float = 0.0  # that the source was expected to save

    def request(self) -> EdgeRequest:
        """Request as a policy would be shown it; a session goes by its number."""
        return EdgeRequest(
            self.id,
            self.model,
            self.prompt_tokens,
            self.max_tokens,
            self.tenant,
            Priority(self.priority),
            session=None if self.session is None else repr(self.session),
            random01=self.draw,
            hashes=struct.unpack(f"<{len(self.hashes) // 8}Q", self.hashes),
            block_tokens=self.block_tokens,
            expected_output=self.expected_output,
        )


class Ended(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="e"):
    """Outcome of a request. Times are in seconds from its arrival; None: it did not get so far."""

    id: str
    ending: str
    replica: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None


class Recorded(msgspec.Struct, frozen=True):
    """A request: its choices, in order, and its end; None: the log ends before it."""

    id: str
    decisions: list[Decided]
    outcome: Ended | None


_decoder = msgspec.msgpack.Decoder(list[Decided | Ended])


def decided(
    at_s: float, request: EdgeRequest, choice: Choice, now: float, route: str, version: str, rule: str
) -> Decided:
    """`at_s` since 1970; `now` by the clock of the snapshots."""
    totals, hashes = choice.totals, request.hashes
    shown: Sequence[int] = range(len(totals))
    if len(totals) > _MAX_CANDIDATES:
        picked = next(
            i for i in shown if choice.candidates[i] is choice.replica
        )  # not the best of all with every picker
        best = heapq.nlargest(_MAX_CANDIDATES, shown, totals.__getitem__)
        shown = [picked, *(i for i in best if i != picked)][:_MAX_CANDIDATES]
    return Decided(
        at_s,
        request.id,
        request.model,
        request.tenant,
        int(request.priority),
        request.prompt_tokens,
        request.max_tokens,
        request.expected_output,
        request.session is not None,
        struct.pack(f"<{len(hashes)}Q", *hashes),
        request.block_tokens,
        choice.strategy,
        list(choice.scores),
        choice.replica.id if choice.replica is not None else None,
        choice.is_approximate,
        len(totals),
        _seen(choice, shown, now),
        choice.dropped,
        request.random01,
        session_bucket(request.session) if request.session is not None else None,
        route,
        version,
        rule,
        *_second_leg(choice),
    )


def _second_leg(choice: Choice) -> tuple[str, str, int, float]:
    if (source := choice.source) is None:
        return "", choice.alone or "", 0, 0.0
    return source.replica.id, source.reason, source.pulled_tokens, source.gain_s


def ended(facts: RequestFacts) -> Ended:
    return Ended(
        facts.id,
        facts.ending,
        facts.replica,
        facts.input_tokens,
        facts.cached_tokens,
        facts.output_tokens,
        facts.queue_s,
        facts.ttft_s,
        facts.total_s,
    )


def _seen(choice: Choice, shown: Sequence[int], now: float) -> list[Seen]:
    """Returns these of a choice's candidates."""
    seen, scored = [], list(map(list, zip(*choice.scores.values(), strict=True)))  # by candidate
    for at in shown:
        replica = choice.candidates[at]
        seen.append(
            Seen(
                replica.id,
                choice.matched.get(replica.id, 0),
                choice.totals[at],
                scored[at] if scored else [],
                replica.sequences,
                replica.max_sequences,
                replica.prefill_queued,
                replica.prefill_tokens_per_s,
                replica.decode_tokens_per_s,
                replica.mean_output_tokens,
                replica.load.num_running,
                replica.kv_used_tokens,
                replica.limits.kv_capacity_tokens,
                now - replica.taken_at,
                replica.share,
                replica.limits.chunk_tokens,
                choice.on_host.get(replica.id, 0),
                replica.host_share,
                replica.load.steps,
            )
        )
    return seen


# -- reading


def file_names(path: Path) -> list[Path]:
    """The newest first."""
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, NUM_FILES))]


def read_entries(path: Path) -> Iterator[Decided | Ended]:
    """In the order they were written. What a crash cut off at a file's end is left out."""
    for name in file_names(path)[::-1]:
        if not name.exists():
            continue
        data = name.read_bytes()
        at = len(MAGIC)
        if data[:at] != MAGIC:
            raise ConfigError(f"{name} is no decision log of this version")
        while at + LENGTH.size <= len(data):
            (length,) = LENGTH.unpack_from(data, at)
            block = data[at + LENGTH.size : at + LENGTH.size + length]
            at += LENGTH.size + length
            if len(block) == length:
                yield from _decoder.decode(zlib.decompress(block))


def read_decisions(path: Path) -> Iterator[Recorded]:
    """Each request with its choices and its end, in the order of their ends; those without one last."""
    open_: dict[str, list[Decided]] = {}
    for one in read_entries(path):
        if isinstance(one, Decided):
            open_.setdefault(one.id, []).append(one)
        elif one.id in open_:
            yield Recorded(one.id, open_.pop(one.id), one)
    for request_id, decisions in open_.items():
        yield Recorded(request_id, decisions, None)
