"""Input of the policy for one pool: demand, replicas by state, measured durations, and the forecast."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class ReplicaState(StrEnum):
    """A replica counts as capacity when it is active, and occupies a device in every state but parked."""

    STARTING = "starting"  # its process starts, or loads its model
    PARKED = "parked"  # its process is alive, weights in host memory, device memory free
    WAKING = "waking"  # from parked to standby
    STANDBY = "standby"  # loaded, and a real token came out; no traffic
    ACTIVE = "active"
    DRAINING = "draining"  # no new requests; goes to `target` when its streams have ended or moved
    PARKING = "parking"
    STOPPING = "stopping"


class CapacityType(StrEnum):
    ON_DEMAND = "on_demand"
    SPOT = "spot"


class ReplicaView(Struct, frozen=True, gc=False, omit_defaults=True):
    """One replica as the policy sees it. Times are the policy's clock."""

    id: str
    state: ReplicaState
    since: float  # when it came into its state
    target: ReplicaState = ReplicaState.ACTIVE  # the state that it is on its way to; `STOPPING`: it goes
    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    price_per_hour: float = 0.0
    started_at: float = 0.0
    deadline: float | None = None  # an interruption notice: it is gone by then
    in_flight: int = 0
    kv_usage: float = 0.0  # share of the KV cache that sequences hold
    cached_blocks: int = 0  # of the prefix cache: what its loss would cost


class Demand(Struct, frozen=True, gc=False, omit_defaults=True):
    """The pool's demand over the last seconds, summed over all gateways. Signals of R35 are all here."""

    arrivals_per_s: float = 0.0  # of the last 15 s or so: what the policy reacts to
    peak_arrivals_per_s: float = 0.0  # the busiest of the last few seconds
    dispersion: float = 1.0  # variance of the arrivals of a second over their mean, of the last minute
    prompt_tokens: float = 0.0  # mean of a request
    output_tokens: float = 0.0
    cached_share: float = 0.0  # of prompt tokens, found in prefix caches
    waiting: int = 0  # requests in gateways' queues
    waiting_tokens: int = 0  # of their prompts, and of those queued in engines
    held: int = 0  # requests that wait for a replica to exist at all
    in_flight: int = 0  # at replicas
    oldest_wait_s: float = 0.0
    wait_p95_s: float = 0.0  # wait before prefill
    ttft_p95_s: float = 0.0
    tpot_p95_s: float = 0.0
    latency_p99_s: float = 0.0
    kv_usage: float = 0.0  # of the fullest active replica's cache
    memory_headroom: float = 1.0  # share of device memory that is free, of the fullest
    active_sequences: float = 0.0  # per active replica
    tokens_per_s: float = 0.0  # prompt and output tokens together
    gpu_utilisation: float = 0.0  # share of time in which devices worked, mean of active replicas


class Durations(Struct, frozen=True, gc=False, omit_defaults=True):
    """Measured p95 seconds of each change of state."""

    start_s: float = 60.0  # from nothing to standby
    wake_s: float = 2.0  # from parked to standby
    activate_s: float = 0.1  # from standby to active
    park_s: float = 2.0
    drain_s: float = 30.0


class ForecastBand(Struct, frozen=True, gc=False):
    """Expected arrivals per second at one time ahead, as quantiles."""

    horizon_s: float
    p50: float
    p90: float
    p99: float


class Offer(Struct, frozen=True, gc=False, omit_defaults=True):
    """Capacity that a driver can still give."""

    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    price_per_hour: float = 0.0
    available: int | None = None  # None: the driver does not know
    refused_until: float = 0.0  # the driver refused; not asked again before


class PoolObservation(Struct, frozen=True, omit_defaults=True):
    pool: str
    demand: Demand
    replicas: tuple[ReplicaView, ...] = ()
    durations: Durations = Durations()
    forecast: tuple[ForecastBand, ...] = ()  # nearest first; for the times that `PoolPolicy.horizons` names
    offers: tuple[Offer, ...] = (Offer(),)  # cheapest acceptable first
    spend_left_per_hour: float | None = None  # of the fleet's, beyond what all pools have now; None: no bound
    floor: int = 0  # active replicas at least, for a rollout
    kept: int = 0  # replicas that are parked at least rather than stopped, for a rollout

    def count(self, *states: ReplicaState) -> int:
        return sum(replica.state in states for replica in self.replicas)
