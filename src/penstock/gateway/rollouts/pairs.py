"""Copies of one request for both versions of a rollout, one after the other: the new one, and the old as its control.

Both are copies: sent when the client has its answer, in random order, under the same limits of load, and cut off as
soon as a client has to wait. Their prompts are cached apart from clients' own, in a namespace of the rollout: the old
version has just answered this request, and would find all of it in its cache. So both versions have seen the same
copies and nothing else, and no cache of a tenant's is filled with what it did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from penstock.core.rollout import Arm, Metric
from penstock.gateway.rollouts.following import MAX_KEPT_BYTES, FollowedRollout
from penstock.gateway.rollouts.observation import Observation, Timing, Values, pair_ratios
from penstock.http.clock import Timer, TimerClock
from penstock.router.routes import Target
from penstock.tenancy.tenants import CacheScope, Tenant

if TYPE_CHECKING:
    from penstock.gateway.proxy.routed_request import RoutedRequest
    from penstock.gateway.proxy.shadow import Copy, CopyEnd

_PAUSE_S = 0.1  # two of a replica's reports: by then the client's own request is no longer counted as in flight
_PATIENCE_S, _PATIENCE = 30.0, 10.0  # and times what the client's answer took: a copy that takes longer has failed
_REFUSED = (429, 503, 529)  # it works, and says that it cannot now


class Sender(Protocol):
    """Sender of copies: `Shadows`."""

    def send(
        self,
        target: Target,
        routed: RoutedRequest,
        output: int | None,
        *,
        tenant: Tenant | None = None,
        max_kept: int = 0,
        told: Callable[[CopyEnd], None] | None = None,
    ) -> Copy | None: ...


class PairedCopies:
    __slots__ = (
        "_clock",
        "_ended",
        "_is_settled",
        "_left",
        "_output",
        "_patience_s",
        "_sender",
        "_tenant",
        "_timer",
        "answer",
        "ends",
        "rollout",
        "routed",
    )

    def __init__(
        self,
        sender: Sender,
        routed: RoutedRequest,
        rollout: FollowedRollout,
        targets: Sequence[Target],
        output: int | None,
        answer: bytes | None,
        total_s: float,
        clock: TimerClock,
        ended: Callable[[PairedCopies], object],
    ) -> None:
        """`targets`: in the order in which they are sent it; `answer`: the client's, None: it was too large to keep;
        `total_s`: what that took."""
        self.routed = routed
        self.rollout = rollout
        self.answer = answer
        self.ends: dict[Arm, CopyEnd] = {}
        self._sender = sender
        self._output = output
        self._left = list(targets)
        self._clock = clock
        self._patience_s = _PATIENCE_S + _PATIENCE * total_s
        self._ended = ended
        self._is_settled = rollout.is_settled(rollout.wall())
        self._timer: Timer | None = None
        self._tenant = _copied(routed.caller.tenant, rollout.order.id)

    def begin(self) -> None:
        self._timer = self._clock.call_later(_PAUSE_S, self._send_next)

    def cancel(self) -> None:
        """Nothing is sent any more."""
        self._left = []
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_whole(self) -> bool:
        """Both versions gave an answer."""
        return len(self.ends) == 2 and all(end.outcome == "ok" for end in self.ends.values())

    def _send_next(self) -> None:
        if not self._left:
            self._pair()
            self._ended(self)
            return
        target = self._left.pop(0)
        arm = Arm.NEW_COPY if target.version == self.rollout.new_version else Arm.OLD_COPY
        kept = MAX_KEPT_BYTES if self.answer is not None else 0
        copy = self._sender.send(
            target,
            self.routed,
            self._output,
            tenant=self._tenant,
            max_kept=kept,
            told=lambda end: self._copy_ended(arm, end),
        )
        if copy is None:
            self._ended(self)
        else:
            self._timer = self._clock.call_later(self._patience_s, copy.give_up)

    def _copy_ended(self, arm: Arm, end: CopyEnd) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if end.outcome == "cut_off":
            self._ended(self)
            return
        self.ends[arm] = end
        is_refused = end.status is not None and end.outcome != "ok" and (end.status in _REFUSED or end.status < 500)
        values = (
            (Metric.ERRORS, float(end.outcome != "ok" and not is_refused)),
            (Metric.REFUSALS, float(is_refused)),
        )
        self.tell(arm, values, self._timing(arm, end))
        self._send_next()

    def _timing(self, arm: Arm, end: CopyEnd) -> Timing | None:
        rollout, usage = self.rollout, end.usage
        if end.outcome != "ok" or usage is None or not (self._is_settled and rollout.is_warm(end.replica)):
            return None
        return Timing(
            end.in_flight,
            max(0, usage.input_tokens - usage.cached_tokens),
            usage.output_tokens,
            end.ttft_s,
            end.total_s,
            end.device_s,
            rollout.price(arm),
        )

    def _pair(self) -> None:
        timings = [self._timing(arm, self.ends[arm]) for arm in (Arm.OLD_COPY, Arm.NEW_COPY) if arm in self.ends]
        if len(timings) == 2 and timings[0] is not None and timings[1] is not None:
            self.tell(Arm.PAIR, pair_ratios(timings[0], timings[1]))

    def tell(self, arm: Arm, values: Values, timing: Timing | None = None) -> None:
        rollout = self.rollout
        rollout.tell(Observation(rollout.order, arm, rollout.wall(), self.routed.caller.tenant.id, values, timing))


def _copied(tenant: Tenant, rollout: str) -> Tenant:
    """Tenant whose request replicas take a copy for: nobody else's prompts are cached under this name."""
    return replace(tenant, id=f"{tenant.namespace}~{rollout}", cache=CacheScope.OWN)
