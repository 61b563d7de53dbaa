"""One client's request of a model under a rollout, from its route to its end: what is noted of it on the way.

On the client's path it only takes things down: the replica's load while it was there, failures of replicas, and
the answer's bytes where they will be compared or checked. What follows from them is worked out elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.admission.decision import ShedReason
from penstock.core.rollout import Arm, Metric
from penstock.gateway.records.facts import Ending, RequestFacts
from penstock.gateway.rollouts.following import MAX_KEPT_BYTES, FollowedRollout
from penstock.gateway.rollouts.load import LoadMeter
from penstock.gateway.rollouts.observation import Observation, Timing
from penstock.router.router import Choice
from penstock.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from penstock.gateway.proxy.routed_request import RoutedRequest

_SHED = frozenset(reason.value for reason in ShedReason)
_OF_REPLICAS = "replica_"  # begins the reason of what a replica refused

Tap = Callable[[bytes], None]


# What a body has that asks for an answer which can be checked.
_CHECKABLE = (b'"response_format"', b'"tools"', b'"structured_outputs"', b'"guided_json"')
_MAX_BODY_BYTES = 128 << 10  # of a request whose answer is checked or compared


def observed(rollout: FollowedRollout, tenant: Tenant, bucket: float, body: bytes) -> ObservedRequest | None:
    """None: it is not measured, or the tenant opted out."""
    if not rollout.order.is_measured or rollout.opted_out(tenant):
        return None
    is_short = len(body) <= _MAX_BODY_BYTES
    is_checked = is_short and any(key in body for key in _CHECKABLE)
    is_copied = is_short and rollout.is_copied(bucket)
    return ObservedRequest(rollout, is_checked=is_checked, is_copied=is_copied)


def pipeline_ended(rollout: FollowedRollout, facts: RequestFacts) -> None:
    """A run of a version that is a pipeline. Its steps go to replicas that are no version's."""
    arm = rollout.arm(facts.version)
    if arm is None or facts.ending in (Ending.CLIENT_GONE, Ending.REFUSED):
        return
    now, is_answer = rollout.wall(), facts.ending is Ending.OK
    values = ((Metric.ERRORS, float(not is_answer)), (Metric.REFUSALS, 0.0))
    is_timed = is_answer and not facts.is_batch and rollout.is_settled(now - (facts.total_s or 0.0))
    timing = _timing(facts, 0, rollout.price(arm)) if is_timed else None
    rollout.tell(Observation(rollout.order, arm, now, facts.tenant, values, timing, facts.id if is_answer else ""))


def _timing(facts: RequestFacts, in_flight: int, hour_price: float | None) -> Timing:
    return Timing(
        in_flight,
        max(0, facts.input_tokens - facts.cached_tokens),
        facts.output_tokens,
        facts.ttft_s,
        facts.total_s,
        facts.device_s,
        hour_price,
        facts.cost,
    )


class ObservedRequest:
    __slots__ = (
        "_arm",
        "_began_s",
        "_failed",
        "_is_warm",
        "_kept",
        "_load",
        "_num_bytes",
        "_refused",
        "_version",
        "is_checked",
        "is_copied",
        "rollout",
        "total_s",
    )

    def __init__(self, rollout: FollowedRollout, *, is_checked: bool, is_copied: bool) -> None:
        """`is_checked`: its answer may be one that can be found wrong; `is_copied`: it is compared with others'."""
        self.rollout = rollout
        self.is_checked = is_checked
        self.is_copied = is_copied
        self.total_s = 0.0  # when it has ended
        self._began_s = rollout.wall()
        self._arm: Arm | None = None  # whose answer it got
        self._version = ""  # that it was sent to first, by its key; empty: to none yet
        self._load: LoadMeter | None = None  # of the replica that it was sent to last
        self._is_warm = False
        self._failed: set[str] = set()  # versions with a replica that failed it
        self._refused: set[str] = set()
        self._kept: list[bytes] | None = [] if is_checked or is_copied else None
        self._num_bytes = 0

    # -- on its way

    def chose(self, version: str, choice: Choice) -> None:
        """A replica, where it is sent now."""
        replica = choice.replica
        if replica is None:
            return
        self._version = self._version or version
        self._load = self.rollout.load_of(replica)
        self._is_warm = self.rollout.is_warm(replica.id)

    def failed(self, version: str) -> None:
        """A replica failed it, whatever becomes of it elsewhere."""
        self._failed.add(version)

    def refused(self, version: str) -> None:
        self._refused.add(version)

    def tapped(self, tap: Tap | None) -> Tap | None:
        """The tap on an answer's bytes that keeps them too, where they are wanted."""
        if self._kept is None:
            return tap
        if tap is None:
            return self._keep

        def both(data: bytes) -> None:
            tap(data)
            self._keep(data)

        return both

    def starts_over(self) -> None:
        """Forgets the answer so far, which the client did not see."""
        if self._kept is not None:
            self._forget()
            self._kept = []

    def _keep(self, data: bytes) -> None:
        if self._kept is None:
            return
        if self._num_bytes + len(data) > MAX_KEPT_BYTES or not self.rollout.take_room(len(data)):
            self._forget()
            self._kept = None
            return
        self._num_bytes += len(data)
        self._kept.append(data)

    def _forget(self) -> None:
        self.rollout.give_room(self._num_bytes)
        self._num_bytes = 0

    # -- at its end

    def answer(self) -> bytes | None:
        """The bytes that were kept. None: none were wanted, or they were too many."""
        return b"".join(self._kept) if self._kept else None

    def close(self, routed: RoutedRequest) -> None:
        """All is done with it. Where its answer can be checked, that is asked for."""
        if self.is_checked and self._arm is not None and (answer := self.answer()) is not None:
            self.rollout.check(self._arm, routed, answer)
        if self._num_bytes:
            self._forget()
        self._kept = None

    @property
    def version(self) -> str:
        return self._version

    def ended(self, facts: RequestFacts) -> None:
        self.total_s = facts.total_s or 0.0
        if self._version and facts.version != self._version:  # it fell back: the version did not serve it
            self._tell(facts, self._version, is_error=self._version not in self._refused, is_answer=False)
        elif facts.ending is Ending.CLIENT_GONE:
            if self._version in self._failed:
                self._tell(facts, self._version, is_error=True, is_answer=False)
        elif facts.ending is Ending.REFUSED and not self._is_versions_refusal(facts.reason):
            return  # a limit of its tenant, which is no version's fault
        else:
            is_error = facts.ending is Ending.FAILED or facts.version in self._failed
            self._tell(facts, facts.version, is_error=is_error, is_answer=facts.ending is Ending.OK)

    def _is_versions_refusal(self, reason: str) -> bool:
        return reason.startswith(_OF_REPLICAS) or reason in _SHED

    def _tell(self, facts: RequestFacts, version: str, *, is_error: bool, is_answer: bool) -> None:
        rollout, order = self.rollout, self.rollout.order
        arm = rollout.arm(version)
        if arm is None:
            return
        if is_answer:
            self._arm = arm
        is_refusal = not is_error and (facts.ending is Ending.REFUSED or version in self._refused)
        values = ((Metric.ERRORS, float(is_error)), (Metric.REFUSALS, float(is_refusal)))
        is_timed = is_answer and not facts.is_batch and self._is_warm and rollout.is_settled(self._began_s)
        in_flight = self._load.mean(is_counted=True) if is_timed and self._load is not None else 0
        rollout.tell(
            Observation(
                order,
                arm,
                rollout.wall(),
                facts.tenant,
                values,
                _timing(facts, in_flight, rollout.price(arm)) if is_timed else None,
                facts.id if is_answer else "",
            )
        )
