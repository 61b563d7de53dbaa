"""One pool of the controller: its settings and policy, and what is measured of it and kept over restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.api.replica_report import ReplicaReport
from penstock.core.settings import Role
from penstock.core.slo import Slo
from penstock.fleet.backoff import Backoff
from penstock.fleet.cost_meter import CostMeter
from penstock.fleet.cost_observer import CostObserver
from penstock.fleet.demand_meter import DemandMeter, Totals
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.durations import MeasuredDurations
from penstock.fleet.lifecycle import Next
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.forecast import Forecaster, ForecastState
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import (
    CapacityType,
    Demand,
    ForecastBand,
    Offer,
    PoolObservation,
    ReplicaState,
    ReplicaView,
)
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile, ReplicaCosts
from penstock.fleet.rounds import PolicyRound, record
from penstock.fleet.settings import PoolSettings, replica_settings
from penstock.fleet.steps import StepRecord
from penstock.observe.redaction import redact
from penstock.tenancy.fleet import FleetReplica, FleetSample, ModelResidency, PoolDemand, PoolStatus

log = logging.getLogger(__name__)

_ID_BYTES = 5
_SHORT_WAKE_S = 5.0  # of parked replicas: a way back that takes longer is none
_SHAPE = ("model", "engine", "server", "gpus", "zones", "price_per_hour", "spot", "kubernetes", "ray")
_MEASURED = {
    ReplicaState.WAKING: "wake_s",
    ReplicaState.PARKING: "park_s",
    ReplicaState.DRAINING: "drain_s",
}
_policy_memory_decoder = msgspec.json.Decoder(PolicyMemory)
_replica_costs_decoder = msgspec.json.Decoder(ReplicaCosts)
_forecast_state_decoder = msgspec.json.Decoder(ForecastState)


class Pool:
    def __init__(
        self,
        name: str,
        settings: PoolSettings,
        slo: Slo,
        fleet: str = "",
        *,
        is_ephemeral: bool = False,
        shares_machine: bool = True,
    ) -> None:
        """`is_ephemeral`: it ends with this process, however that ends. `shares_machine`: its replicas are here."""
        self.name = name
        self.serves = settings.serves or name  # as gateways know its replicas, and the demand for them
        self.fleet = fleet
        self._is_ephemeral = is_ephemeral
        self.settings = settings
        self.slo = slo
        self.spec_settings = replica_settings(name, settings, slo, shares_machine=shares_machine)
        self.durations = MeasuredDurations()
        self._costs = CostObserver()
        self._policy = PoolPolicy(settings, slo, None)
        self._forecaster = Forecaster(timezone=settings.timezone)
        self._reason = ""  # of the last decision that had one
        self._memory = PolicyMemory()
        self._last: tuple[PoolObservation, PolicyMemory, Decision] | None = None
        self._meter = DemandMeter()
        self._refused_until: dict[tuple[str, CapacityType], float] = {}
        self._sampled = Totals()
        self._spending = CostMeter()
        self._steps = StepRecord()
        self._counts: Counter[str] = Counter()
        self._expected = ForecastBand(0.0, 0.0, 0.0, 0.0)
        self._backoff = Backoff()  # of starts that fail
        self._failure = ""
        self._driver_failure, self._driver_failures = "", 0  # in a row
        self._is_blind = False

    # -- what is kept over restarts

    def restore(self, kept: Mapping[str, str], now: float) -> None:
        """Restores what the store kept. A part that cannot be read was written by another version, and is learned anew.
        The number that was wanted long ago says nothing of now."""
        for name, document in kept.items():
            with contextlib.suppress(msgspec.DecodeError, ValueError, KeyError):
                match name:
                    case "durations":
                        self.durations.restore(document)
                    case "spending":
                        self._spending.restore(document)
                    case "policy":
                        self._memory = _policy_memory_decoder.decode(document)
                    case "costs":
                        self._costs.costs = _replica_costs_decoder.decode(document)
                        self._policy.profile = CapacityProfile(self._costs.costs)
                    case "forecast":
                        state = _forecast_state_decoder.decode(document)
                        self._forecaster = Forecaster(state, timezone=self.settings.timezone)
                    case "reason":
                        self._reason = msgspec.json.decode(document, type=str)
        if self._memory.at is not None and now - self._memory.at > self.settings.down_cooldown_s:
            self._memory = msgspec.structs.replace(self._memory, wanted=None, needs=())

    def to_keep(self) -> dict[str, str]:
        kept: dict[str, msgspec.Struct | str] = {
            "policy": self._memory,
            "forecast": self._forecaster.state,
            "reason": self._reason,
        }
        if self._policy.profile is not None:
            kept["costs"] = self._costs.costs
        return {"durations": self.durations.encode(), "spending": self._spending.encode()} | {
            name: msgspec.json.encode(value).decode() for name, value in kept.items()
        }

    # -- observe, decide

    def observe_driver(self, failure: str, num_failures: int, *, is_blind: bool) -> None:
        """A driver that has not listed its replicas is asked for no others."""
        self._driver_failure, self._driver_failures, self._is_blind = failure, num_failures, is_blind

    def observe_demand(self, rows: Iterable[PoolDemand], now: float) -> None:
        """`rows`: of the pool that it serves."""
        self._meter.observe(rows, now)
        self._forecaster.observe(now, self._meter.demand(now).arrivals_per_s)

    def observation(
        self,
        rows: Iterable[FleetReplica],
        reports: Mapping[str, ReplicaReport],
        now: float,
        spend_left_per_hour: float | None = None,
        *,
        demand: Demand | None = None,
        floor: int = 0,
        kept: int = 0,
    ) -> PoolObservation:
        """`demand`: in place of its own; `floor` and `kept`: of a rollout."""
        views = tuple(_view(row, reports.get(row.id)) for row in rows)
        for view in views:
            if view.id in reports:
                self._costs.observe(view.id, reports[view.id].measured)
                self._check_parking(reports[view.id])
        if self._costs.has_changed():
            self._policy.profile = CapacityProfile(self._costs.costs)
        durations = self.durations.p95()
        forecast = self._forecaster.bands(now, self._policy.horizons(durations))
        self._expected = min(forecast, key=lambda band: abs(band.horizon_s - durations.start_s))
        return PoolObservation(
            self.name,
            self._with_reports(self._of_role(demand or self._meter.demand(now)), views, reports),
            views,
            durations,
            forecast,
            self._offers(),
            spend_left_per_hour,
            floor,
            kept,
        )

    def demand(self, now: float) -> Demand:
        """The demand that gateways saw."""
        return self._meter.demand(now)

    @property
    def can_park(self) -> bool:
        """Whether its replicas can be parked, and are soon back."""
        return self._policy.settings.parked != 0 and self.durations.p95().wake_s <= _SHORT_WAKE_S

    @property
    def goes_by_demand(self) -> bool:
        """Whether its size follows from its demand, and not from thresholds of what its replicas do."""
        return self._policy.profile is not None and not self.settings.scale_on

    def _check_parking(self, report: ReplicaReport) -> None:
        """Replicas whose engine has no such state are not planned to be parked. One that starts cannot say yet."""
        if report.state == "ready" and not report.can_park and self._policy.settings.parked != 0:
            if self.settings.parked:
                log.warning(
                    "%s: its replicas cannot be parked, so `parked: %d` is none", self.name, self.settings.parked
                )
            settings = dataclasses.replace(self.settings, parked=0)
            self._policy = PoolPolicy(settings, self.slo, self._policy.profile)

    def decide(self, observation: PoolObservation, now: float) -> Decision:
        before = self._memory
        decision, self._memory = self._policy.decide(observation, before, now)
        self._last = observation, before, decision
        if self.settings.advisory:
            decision = msgspec.structs.replace(decision, actions=())
        self._reason = decision.reason or self._reason
        self._steps.observe(decision.wanted, now)
        self._counts.update(str(action.kind) for action in decision.actions)
        return decision

    def take_decision(self, decision: Decision) -> None:
        """A decision for several pools together, in place of `decide`. Models that take turns come and go: their steps
        are no flapping."""
        self._reason = decision.reason or self._reason
        self._counts.update(str(action.kind) for action in decision.actions)

    @property
    def num_arrivals(self) -> int:
        """Requests that gateways have had for it, since this controller began."""
        return self._meter.totals().arrivals

    def round(self) -> PolicyRound | None:
        """The last call of `decide` with all that went into it, for the store; None: others decide for it."""
        return record(self._policy, *self._last) if self._last is not None else None

    def status(
        self,
        decision: Decision,
        rows: Sequence[FleetReplica],
        now: float,
        residency: ModelResidency | None = None,
    ) -> PoolStatus:
        """The pool after a round; also the moment at which its replicas are paid for. `residency`: of a model that
        shares its device with others, and so may have to wait for its memory."""
        self._spending.observe(rows, now)
        states = _count_states(rows)
        starts = [now - row.created_at for row in rows if row.state == ReplicaState.STARTING]
        eta_s = self._eta_s(rows, now)
        if eta_s is None and residency is not None and residency.wait_s is not None:
            eta_s = residency.wait_s + self._fastest_s(states)
        return PoolStatus(
            self.name,
            now,
            wanted=decision.wanted,
            min=self.settings.min,
            max=self.settings.max,
            states=states,
            eta_s=eta_s,
            start_s=self._fastest_s(states),
            hold_s=self.settings.hold_s,
            reason=self._reason,
            bound=decision.bound,
            arrivals_per_s=self._meter.demand(now).arrivals_per_s,
            forecast_p50=self._expected.p50,
            forecast_p90=self._expected.p90,
            cost_per_hour=sum(row.price_per_hour for row in rows),
            durations=msgspec.structs.asdict(self.durations.p95()),
            oldest_start_s=max(starts, default=0.0),
            start_failures=max(self._backoff.num_failures, self._driver_failures),
            failure=self._driver_failure or self._failure,
            counts=dict(self._counts),
            reversals=self._steps.num_reversals,
            fleet=self.fleet,
            is_ephemeral=self._is_ephemeral,
            serves="" if self.serves == self.name else self.serves,
            residency=residency,
            takes_tensors=self.settings.tensors,
        )

    def claim(self, now: float) -> PoolStatus:
        """The pool before its first round."""
        serves = "" if self.serves == self.name else self.serves
        return PoolStatus(
            self.name,
            now,
            fleet=self.fleet,
            is_ephemeral=self._is_ephemeral,
            serves=serves,
            takes_tensors=self.settings.tensors,
        )

    def sample(self, decision: Decision, rows: Sequence[FleetReplica], now: float) -> FleetSample:
        """The pool in the last minute, for the history."""
        demand = self._meter.demand(now)
        before, self._sampled = self._sampled, self._meter.totals()
        seconds, costs = self._spending.take()
        return FleetSample(
            now,
            self.name,
            _count_states(rows),
            demand.arrivals_per_s,
            demand.prompt_tokens,
            demand.output_tokens,
            self._expected.p50,
            self._expected.p90,
            decision.wanted,
            sum(costs.values()),
            costs,
            seconds,
            self._sampled.tokens - before.tokens,
            self._sampled.in_slo - before.in_slo,
            self._sampled.out_of_slo - before.out_of_slo,
            self._sampled.arrivals - before.arrivals,
            self._sampled.refused - before.refused,
            demand.cached_share,
        )

    # -- replicas

    def priced(self, row: FleetReplica) -> FleetReplica:
        """The row with the price of its state."""
        parked = self.settings.parked_price_per_hour or 0.0
        price = parked if row.state == ReplicaState.PARKED else row.full_price_per_hour
        return msgspec.structs.replace(row, price_per_hour=price)

    def new_replica(self, action: Action, now: float) -> FleetReplica:
        """Row of a replica that is to be started."""
        settings, is_spot = self.settings, action.capacity_type is CapacityType.SPOT
        price = settings.spot.price_per_hour if is_spot else settings.price_per_hour
        return FleetReplica(
            f"{self.name.replace('@', '-').replace('/', '-')}-{secrets.token_hex(_ID_BYTES)}",
            self.name,
            ReplicaState.STARTING,
            now,
            target=action.to,
            zone=action.zone,
            capacity_type=action.capacity_type,
            price_per_hour=price,
            full_price_per_hour=price,
            created_at=now,
            fleet=self.fleet,
        )

    def adopted(self, listed: DriverReplica, known: FleetReplica | None, now: float) -> FleetReplica:
        """Row of a replica that something else starts and stops, as it is seen."""
        state = ReplicaState.ACTIVE if listed.is_ready and listed.url else ReplicaState.STARTING
        if listed.deadline_s is not None:
            state = ReplicaState.DRAINING
        if known is None:
            action = Action(ActionKind.START, "", zone=listed.zone, capacity_type=listed.capacity_type)
            known = msgspec.structs.replace(self.new_replica(action, now), id=listed.id)
        if state != known.state:
            ready_at = known.ready_at or (now if state is ReplicaState.ACTIVE else None)
            known = msgspec.structs.replace(known, state=state, since=now, ready_at=ready_at)
        return msgspec.structs.replace(known, url=listed.url)

    def spec(self, row: FleetReplica) -> ReplicaSpec:
        return ReplicaSpec(
            row.id,
            row.pool,
            self.spec_settings,
            zone=row.zone,
            capacity_type=CapacityType(row.capacity_type),
            gpus=self.settings.gpus,
        )

    @property
    def role(self) -> Role:
        return self.spec_settings.server.role

    def has_shape_of(self, other: Pool) -> bool:
        """Whether a replica of this pool can become one of the other by its role alone."""
        if self.serves != other.serves or self.settings.advisory or other.settings.advisory:
            return False
        if self.spec_settings.engine.kv_port != other.spec_settings.engine.kv_port:
            return False
        return all(getattr(self.settings, name) == getattr(other.settings, name) for name in _SHAPE)

    def measure(self, row: FleetReplica, step: Next, now: float) -> None:
        """Durations of changes of state, and failures."""
        if step.row is None:
            self._costs.forget(row.id)
        if step.failure:
            log.warning("replica %s of %s is lost: %s", row.id, row.pool, redact(step.failure))
            if row.ready_at is not None:
                self._counts["lost"] += 1
            else:
                refused = CapacityType(row.capacity_type) if step.row is None else None
                wait_s = self._start_failed(now, redact(step.failure), row.zone, refused)
                log.warning("the next start of %s is in %.0f s at the earliest", row.pool, wait_s)
        elif step.row is not None and step.row.state != row.state:
            if row.state == ReplicaState.STARTING and step.row.ready_at is not None:
                self._backoff, self._failure = Backoff(), ""
                self.durations.add("start_s", now - row.created_at)
            elif (name := _MEASURED.get(ReplicaState(row.state))) is not None:
                self.durations.add(name, now - row.since)

    def _start_failed(self, now: float, why: str, zone: str, refused: CapacityType | None) -> float:
        """No other start before a while, which doubles. `refused`: the driver has no capacity of this type in this
        zone; None: all others wait too. Returns the seconds."""
        self._failure = why
        self._counts["failed_start"] += 1
        wait_s = self._backoff.fail(now)
        if refused is CapacityType.SPOT:
            wait_s = float(self.settings.spot.retry_s)
        zones = [zone] if refused is not None else self.settings.zones or [""]
        for kind in [refused] if refused is not None else CapacityType:
            self._refused_until |= dict.fromkeys(((each, kind) for each in zones), now + wait_s)
        return wait_s

    # -- inside

    def _offers(self) -> tuple[Offer, ...]:
        settings = self.settings
        if self._is_blind:
            return ()
        kinds = {CapacityType.ON_DEMAND: settings.price_per_hour}
        if settings.spot.share > 0:
            kinds[CapacityType.SPOT] = settings.spot.price_per_hour
        return tuple(
            Offer(zone, kind, price, refused_until=self._refused_until.get((zone, kind), 0.0))
            for kind, price in sorted(kinds.items(), key=lambda item: item[1])
            for zone in settings.zones or [""]
        )

    def _of_role(self, demand: Demand) -> Demand:
        """A prefill pool has the prompts alone; those that wait in gateways wait for replicas that answer."""
        if self.settings.role != "prefill":
            return demand
        return msgspec.structs.replace(
            demand,
            output_tokens=min(1.0, demand.output_tokens),
            waiting=0,
            waiting_tokens=0,
            held=0,
            oldest_wait_s=0.0,
            tpot_p95_s=0.0,
        )

    def _with_reports(
        self, demand: Demand, views: tuple[ReplicaView, ...], reports: Mapping[str, ReplicaReport]
    ) -> Demand:
        active = [reports[view.id] for view in views if view.state is ReplicaState.ACTIVE and view.id in reports]
        if not active:
            return demand
        loads = [report.measured.load for report in active]
        memory = [
            1.0 - device.memory_used_bytes / device.memory_total_bytes
            for report in active
            for device in report.measured.device.devices
            if device.memory_total_bytes and device.memory_used_bytes is not None
        ]
        busy = [
            device.utilization
            for report in active
            for device in report.measured.device.devices
            if device.utilization is not None
        ]
        return msgspec.structs.replace(
            demand,
            waiting_tokens=demand.waiting_tokens + sum(load.queued_tokens for load in loads),
            kv_usage=max(report.measured.kv_usage for report in active),
            memory_headroom=min(memory, default=1.0),
            active_sequences=sum(load.num_running for load in loads) / len(active),
            gpu_utilisation=sum(busy) / len(busy) if busy else 0.0,
        )

    def _eta_s(self, rows: Iterable[FleetReplica], now: float) -> float | None:
        """Returns the seconds until the next replica is active, of those that are on their way. A change that takes
        longer than usual is expected to take a quarter longer than it has."""
        durations = self.durations.p95()
        usual_s = {
            ReplicaState.STARTING: durations.start_s,
            ReplicaState.WAKING: durations.wake_s,
            ReplicaState.PARKED: durations.wake_s,
            ReplicaState.STANDBY: durations.activate_s,
        }
        found = []
        for row in rows:
            if row.target == ReplicaState.ACTIVE and (seconds := usual_s.get(ReplicaState(row.state))) is not None:
                passed_s = now - row.since
                found.append(max(seconds - passed_s, passed_s / 4))
        return max(min(found), 0.5) if found else None

    def _fastest_s(self, states: Mapping[str, int]) -> float:
        durations = self.durations.p95()
        if states.get(ReplicaState.STANDBY):
            return durations.activate_s
        return durations.wake_s if states.get(ReplicaState.PARKED) else durations.start_s


def _count_states(rows: Iterable[FleetReplica]) -> dict[str, int]:
    return dict(Counter(row.state for row in rows))


def _view(row: FleetReplica, report: ReplicaReport | None) -> ReplicaView:
    measured = report.measured if report is not None else None
    return ReplicaView(
        row.id,
        ReplicaState(row.state),
        row.since,
        ReplicaState(row.target),
        row.zone,
        CapacityType(row.capacity_type),
        row.full_price_per_hour,
        row.created_at,
        row.deadline,
        measured.load.num_open if measured is not None else 0,
        measured.kv_usage if measured is not None else 0.0,
        measured.cache.cached_blocks if measured is not None else 0,
    )
