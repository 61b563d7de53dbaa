"""Known answers: is what a replica says to a known question what it should say?

Compared are log-probabilities of the greedy tokens, one after another. Kernels, batch sizes and number formats move
them by hundredths, and may turn a near tie; what is broken moves them by whole units. After the first token that
differs nothing can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

TOLERANCE = 0.5  # of a log-probability
_ROUNDS_TO_AGREE = 3  # if they have not by then, somebody is wrong


class SaidToken(Struct, frozen=True):
    text: str
    logprob: float
    others: dict[str, float] = {}  # the likeliest at this place, with itself


Said = tuple[SaidToken, ...]


class Comparison(Struct, frozen=True):
    drift: float  # the largest difference
    reason: str = ""  # what is wrong; empty: nothing

    @property
    def is_same(self) -> bool:
        return not self.reason


def compare(known: Said, said: Said, tolerance: float = TOLERANCE) -> Comparison:
    drift = 0.0
    if not said:
        return Comparison(0.0, "it says nothing") if known else Comparison(0.0)
    for place, (expected, got) in enumerate(zip(known, said, strict=False)):
        if expected.text != got.text:
            return _turned(place, expected, got, drift, tolerance)
        drift = max(drift, abs(expected.logprob - got.logprob))
        if drift > tolerance:
            return Comparison(drift, f"the log-probability of token {place} is off by {drift:.2f}")
    if len(said) < len(known):
        return Comparison(drift, f"it stops after {len(said)} of {len(known)} tokens")
    return Comparison(drift)


def _turned(place: int, expected: SaidToken, got: SaidToken, drift: float, tolerance: float) -> Comparison:
    """Another token: harmless if both were about as likely, for both."""
    least = min(got.others.values(), default=got.logprob)
    theirs = got.logprob - got.others.get(expected.text, least - tolerance)
    least = min(expected.others.values(), default=expected.logprob)
    ours = expected.logprob - expected.others.get(got.text, least - tolerance)
    drift = max(drift, theirs, ours)
    if theirs <= tolerance and ours <= tolerance:
        return Comparison(drift)
    return Comparison(drift, f"token {place} is {got.text!r} instead of {expected.text!r}")


def agreed(answers: Mapping[str, Said], tolerance: float = TOLERANCE) -> Said | None:
    """Returns what most replicas say, to be the known answer from now on; None: no majority."""
    for said in answers.values():
        if said and 2 * sum(compare(said, other, tolerance).is_same for other in answers.values()) > len(answers):
            return said
    return None


class ProbeStatus(Struct, kw_only=True):
    """The status of one question to one replica."""

    state: str = "learning"
    drift: float | None = None
    reason: str = ""
    asked_at: float | None = None
    asked: int = 0
    failed: int = 0
    wrong: int = 0
    row: int = 0  # of what is not ok, of one kind


class KnownAnswers:
    """The known answer to one question of one model and adapter, and how its replicas do."""

    def __init__(self, known: Said | None = None, tolerance: float = TOLERANCE) -> None:
        self.known = known
        self.statuses: dict[str, ProbeStatus] = {}
        self._tolerance = tolerance
        self._first: dict[str, Said] = {}

    def said(self, replicas: Sequence[str], answers: Mapping[str, Said | None], wall_s: float) -> None:
        """One round: what each of the replicas said; None: nothing."""
        for gone in self.statuses.keys() - set(replicas):
            del self.statuses[gone]
        if self.known is None:
            self._first |= {name: said for name, said in answers.items() if said}
            self.known = agreed({name: said for name, said in self._first.items() if name in replicas})
        for name, said in answers.items():
            self._judge(self.statuses.setdefault(name, ProbeStatus()), said, wall_s)

    def forget(self, replica: str) -> None:
        self.statuses.pop(replica, None)
        self._first.pop(replica, None)

    def _judge(self, status: ProbeStatus, said: Said | None, wall_s: float) -> None:
        before = status.state
        status.asked_at = wall_s
        status.asked += 1
        if said is None:
            status.state, status.reason = "failed", "no answer"
            status.failed += 1
        elif self.known is None:
            is_split = status.asked > _ROUNDS_TO_AGREE
            status.state = "wrong" if is_split else "learning"
            status.reason = "the replicas do not agree" if is_split else ""
            status.wrong += is_split
        else:
            found = compare(self.known, said, self._tolerance)
            status.drift = round(found.drift, 6)
            status.state, status.reason = "ok" if found.is_same else "wrong", found.reason
            status.wrong += not found.is_same
        status.row = status.row + 1 if status.state == before else 1
