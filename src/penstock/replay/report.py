"""The report of a replay, as plain data: what `--json` prints and what the tables are made of."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.replay.estimate import Column, Fit, Judgement, Spread, judge, spread
from penstock.replay.replay import Change, Replay, Tally
from penstock.router.explanation import route_header

Mask = NDArray[np.bool_]

_LITTLE = 0.5  # of the variance
_CARRIED = (
    "What a policy changes is carried along by a model: prompts run off at the measured speed, a replica keeps what it "
    "was sent while that fits, and who has no room is not picked. Requests come when they came, and stay as long as "
    "they did; speeds are as recorded. --alone leaves all of it out."
)
_ALONE = (
    "Each choice is judged alone, by what the replicas were doing and holding then: after its first other choice they "
    "would have done and held something else. Who could be picked, and the wait at the gateway, are as recorded."
)


class Log(msgspec.Struct, frozen=True):
    """The log that was read."""

    first_s: float  # since 1970
    last_s: float
    strategies: dict[str, int]  # to choices
    models: dict[str, int]
    num_requests: int
    num_choices: int  # a request that is sent elsewhere has several
    num_free: int  # of them, those with more than one candidate
    num_cut: int  # of them, those with more candidates than the log keeps
    num_hashed: int  # of them, those whose prompt's blocks are known
    prompt_tokens: int
    cached_tokens: int  # as replicas told


class Share(msgspec.Struct, frozen=True):
    requests: float  # of all
    computed: float  # of all prompt tokens that are computed


class Changed(msgspec.Struct, frozen=True):
    """A request that would have gone elsewhere. Times are the router's own estimates, from its being sent."""

    id: str
    at_s: float
    prompt_tokens: int
    recorded: str
    other: str
    recorded_s: float
    other_s: float
    measured_s: float | None
    because: str
    recorded_route: str  # as `x-penstock-route` said
    other_route: str


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one policy."""

    agreement: float  # the share of choices among several that are as recorded
    reused_tokens: int
    shares: dict[str, Share]  # by replica
    ttft: Spread | None  # estimated, with the recorded wait at the gateway; None: no request ended
    more_s: float = 0.0  # its mean less that of the recorded choices, both estimated
    more_error_s: float = 0.0  # two standard errors of it: chance alone, not what the estimate gets wrong
    measured_same: Spread | None = None  # of requests that it would have sent where they went
    changed: list[Changed] = []


class Report(msgspec.Struct, frozen=True):
    carries: bool
    log: Log
    estimate: Judgement
    is_fitted: bool  # the estimates below are by the fit; else they are the router's own
    recorded: Outcome
    others: dict[str, Outcome]
    limits: list[str]


def report(replay: Replay) -> Report:
    log = Log(
        replay.first_s,
        replay.last_s,
        dict(replay.strategies),
        dict(replay.models),
        replay.num_requests,
        replay.num_choices,
        replay.num_free,
        replay.num_cut,
        replay.num_hashed,
        replay.prompt_tokens,
        replay.cached_tokens,
    )
    is_timed = ~np.array(replay.by_guess(), bool)
    waited, measured = np.array(replay.waited), np.where(is_timed, np.array(replay.measured), np.nan)
    judgement = judge(replay.recorded.times, waited, measured)
    fit = judgement.fit or Fit()

    def outcome(tally: Tally) -> Outcome:
        return _outcome(tally, replay.recorded, fit, waited, measured, is_timed, replay.num_free)

    others = {name: outcome(tally) for name, tally in replay.others.items()}
    limits = _limits(log, judgement, replay.carries, int((~is_timed).sum()))
    return Report(replay.carries, log, judgement, judgement.fit is not None, outcome(replay.recorded), others, limits)


def _outcome(
    tally: Tally, recorded: Tally, fit: Fit, waited: Column, measured: Column, is_timed: Mask, num_free: int
) -> Outcome:
    agreement = 1.0 if tally is recorded else tally.num_same / num_free if num_free else 1.0
    found = Outcome(agreement, tally.reused_tokens, _shares(tally), None)
    if not is_timed.any():
        return found
    own, theirs = fit.seconds(recorded.times), fit.seconds(tally.times)
    more = (theirs - own)[is_timed]
    same = ~np.isnan(measured) & (np.ones(len(waited), bool) if tally is recorded else np.array(tally.same, bool))
    return msgspec.structs.replace(
        found,
        ttft=spread((waited + theirs)[is_timed]),
        more_s=float(more.mean()),
        more_error_s=float(2 * more.std() / len(more) ** 0.5),
        measured_same=spread(measured[same]) if same.any() else None,
        changed=[_changed(change) for _, _, change in sorted(tally.changes, reverse=True)],
    )


def _shares(tally: Tally) -> dict[str, Share]:
    requests, computed = max(1, tally.requests.total()), max(1, tally.computed.total())
    return {
        name: Share(tally.requests[name] / requests, tally.computed[name] / computed) for name in sorted(tally.requests)
    }


def _changed(change: Change) -> Changed:
    decided, ended = change.decided, change.ended
    measured_s = None if ended.ttft_s is None else ended.ttft_s - (ended.queue_s or 0.0)
    return Changed(
        decided.id,
        decided.at_s,
        decided.prompt_tokens,
        change.recorded.replica.id,
        change.other.replica.id,
        change.recorded.parts.total_s,
        change.other.parts.total_s,
        measured_s,
        because(change),
        route_header(change.recorded.choice),
        route_header(change.other.choice),
    )


def because(change: Change) -> str:
    """Returns how the two replicas differed, as the other policy saw them."""
    shown, new = change.other.shown, change.other.replica
    old = next((one for one in shown.replicas if one.id == change.recorded.replica.id), None)
    if old is None:
        return "where it went there would have been no room"
    facts = [
        ("of its tokens there", shown.matched_tokens(new), shown.matched_tokens(old)),
        ("tokens to compute before it", new.prefill_queued, old.prefill_queued),
        ("sequences", new.sequences, old.sequences),
    ]
    told = [f"{theirs:,} instead of {own:,} {what}" for what, theirs, own in facts if theirs != own]
    return ", ".join(told) or "nothing between the two but whose turn it is"


def _limits(log: Log, judgement: Judgement, carries: bool, num_guessed: int) -> list[str]:
    found = [_CARRIED if carries else _ALONE]
    best = judgement.fitted or judgement.router
    if best is None:
        found.append(
            "No stream of this log has a measured time to its first token: nobody can tell how wrong the estimates are."
        )
    elif best.explained < _LITTLE:
        found.append(
            f"The estimate explains {max(0.0, best.explained):.0%} of what was measured: believe which policy is "
            "better where the difference is large, and no number of seconds."
        )
    if judgement.measured is not None and judgement.fit is None:
        found.append("There are too few measured requests to fit the estimate to them: it is the router's own.")
    if num_guessed:
        found.append(
            f"Times are without {num_guessed:,} requests that came before any replica had measured how fast it is."
        )
    if log.num_choices and not log.num_hashed:
        found.append(
            "The log names no prompt's blocks, as it is with strategies that do not go by prefixes: what another would "
            "have reused is not known, and kv_aware goes by load alone."
        )
    if log.num_cut:
        found.append(
            f"{log.num_cut:,} choices had more candidates than the log keeps: of those the best, by the recorded "
            "policy, are all that another could pick from."
        )
    return found
