"""The fleet's part of the store: demand that gateways see, replicas and decisions of the controller, and its lease.

    gateways ──demand──▶ fleet_demand      fleet_pools ──ETA──▶ gateways
    controller ──▶ fleet_replicas, fleet_decisions, fleet_rounds, fleet_memory, fleet_history   (fenced by its lease)

None of it takes a revision: gateways learn of replicas by the table `replicas`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from msgspec import Struct, field

from penstock.core.errors import LeaseLost, PoolTaken
from penstock.observe.background import count_error
from penstock.tenancy.database import Database, Execute
from penstock.tenancy.replicas import ReplicaRow, write_members

T = TypeVar("T", bound=Struct)
MAX_DECISIONS = 20_000  # per pool
MAX_HISTORY = 30 * 24 * 60  # samples per pool: a month of minutes
MAX_ROUNDS = 7 * 24 * 60  # per pool: a week, if nothing were decided
DEMAND_STALE_S = 30.0  # a gateway that has not written for so long is gone
STATUS_STALE_S = 30.0  # a pool that no controller has written of for so long has none
_DEMAND_KEPT_S = 3600.0  # then its rows are removed by others
_ENDED_S = 120.0  # an ephemeral fleet that has written nothing for so long is removed by others


class PoolDemand(Struct, frozen=True, omit_defaults=True):
    """One gateway's view of one pool. Counters grow from the gateway's start; the others are as of `at`."""

    gateway: str  # another name after each start: counters begin anew
    pool: str
    at: float  # seconds since 1970
    arrivals: int = 0
    finished: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, found in prefix caches
    output_tokens: int = 0
    waiting: int = 0
    waiting_by_class: dict[str, int] = field(default_factory=dict)
    waiting_tokens: int = 0  # of the prompts that wait
    held: int = 0  # of those waiting, for want of any replica
    in_flight: int = 0
    oldest_wait_s: float = 0.0
    wait_p95_s: float = 0.0  # these of the last 30 s; 0: no request
    ttft_p95_s: float = 0.0
    tpot_p95_s: float = 0.0
    latency_p99_s: float = 0.0
    in_slo: int = 0  # finished requests that kept every objective
    out_of_slo: int = 0


class FleetReplica(Struct, frozen=True, omit_defaults=True):
    """A replica that the controller has, from before its start until its process is gone. Times: seconds since 1970."""

    id: str
    pool: str
    state: str
    since: float
    target: str = "active"
    url: str = ""
    zone: str = ""
    capacity_type: str = "on_demand"
    price_per_hour: float = 0.0  # in the state that it is in
    full_price_per_hour: float = 0.0  # in every state but parked
    created_at: float = 0.0
    ready_at: float | None = None
    deadline: float | None = None  # an interruption notice
    failure: str = ""
    fleet: str = ""  # its controllers' name: several fleets may have one store


class ModelOrder(Struct, frozen=True, omit_defaults=True):
    """An operator's word about a model that shares its device with others."""

    model: str
    wish: str = ""  # a `core.residency.Wish`; empty: as its requests need it
    pinned: bool = False  # it is loaded, and stays
    at: float = 0.0  # seconds since 1970
    by: str = ""


class ModelResidency(Struct, frozen=True, omit_defaults=True):
    """A model that shares its device with others, as its controller last left it."""

    state: str  # a `core.residency.Residence`
    pinned: bool = False
    wish: str = ""  # the order that is not done yet, as in `ModelOrder`
    reason: str = ""  # of its last change, or why it waits
    refusal: str = ""  # why its requests are refused; empty: they are not
    wait_s: float | None = None  # it is to be loaded, and this is how long others may still keep the memory
    fixed_bytes: int = 0  # weights, steps and process
    floor_bytes: int = 0  # of KV cache, at least
    kv_bytes: int = 0  # of KV cache, now
    held_bytes: int = 0  # of the device, now
    device: str = ""
    device_bytes: int = 0  # for all models together
    loaded_at: float | None = None  # seconds since 1970
    used_at: float | None = None
    in_flight: int = 0  # requests at it, of all gateways
    waiting: int = 0  # requests that are held for it
    loads: int = 0
    unloads: int = 0
    min_residence_s: float = 0.0


class PoolStatus(Struct, frozen=True, omit_defaults=True):
    """A pool as its controller last left it."""

    pool: str
    at: float
    wanted: int = 0
    min: int = 0
    max: int = 0
    states: dict[str, int] = field(default_factory=dict)
    eta_s: float | None = None  # until the next replica is active; None: none is on its way
    start_s: float = 0.0  # measured p95 of the cheapest way to another active replica
    hold_s: float = 0.0  # how long requests may be held; 0: they are refused
    reason: str = ""  # why `wanted` is what it is, as of its last change
    bound: str = ""  # what keeps `wanted` from what the demand needs: min, max, spend, quota or schedule
    arrivals_per_s: float = 0.0
    forecast_p50: float = 0.0  # arrivals per second, expected by the time that a replica started now is ready
    forecast_p90: float = 0.0
    cost_per_hour: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)  # measured p95 seconds of each change of state
    oldest_start_s: float = 0.0  # how long the slowest start under way has taken
    start_failures: int = 0  # starts in a row that failed
    failure: str = ""  # why the last of them did
    counts: dict[str, int] = field(default_factory=dict)  # actions by kind and failures, since the controller began
    reversals: int = 0  # steps up or down of the last hour that were taken back within five minutes
    fleet: str = ""  # its controllers' name
    is_ephemeral: bool = False  # the pool ends with its controller's process, however that ends
    serves: str = ""  # the pool whose model its replicas serve beside that one's; empty: its own
    residency: ModelResidency | None = None  # of a model that shares its device with others
    takes_tensors: bool = False  # its model makes no text


class FleetDecision(Struct, frozen=True):
    at: float
    pool: str
    document: msgspec.Raw  # a `fleet.policy.decision.Decision`


class FleetSample(Struct, frozen=True, omit_defaults=True):
    """A pool in one minute."""

    at: float
    pool: str
    states: dict[str, int] = field(default_factory=dict)
    arrivals_per_s: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    forecast_p50: float = 0.0
    forecast_p90: float = 0.0
    wanted: int = 0
    cost: float = 0.0  # of this minute, every state that has a price counted
    costs: dict[str, float] = field(default_factory=dict)  # the same by state
    seconds: dict[str, float] = field(default_factory=dict)  # replica-seconds by state
    tokens: int = 0  # of prompts and answers that ended in this minute
    in_slo: int = 0
    out_of_slo: int = 0
    arrivals: int | None = None  # requests of this minute; None: written by a version that did not count them
    refused: int = 0  # of them
    cached_share: float = 0.0  # of prompt tokens, found in prefix caches


class Lease(Struct, frozen=True):
    holder: str
    epoch: int  # grows with each holder: what an older one still writes is refused
    beat: int  # grows with each renewal


pool_status_decoder = msgspec.json.Decoder(PoolStatus)
_demand_decoder = msgspec.json.Decoder(PoolDemand)
_replica_decoder = msgspec.json.Decoder(FleetReplica)
_sample_decoder = msgspec.json.Decoder(FleetSample)
_model_order_decoder = msgspec.json.Decoder(ModelOrder)
_member_decoder = msgspec.json.Decoder(ReplicaRow)


class FleetBook:
    """Blocks: for commands and for threads of their own."""

    def __init__(
        self, database: Database, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._monotonic = monotonic
        self._clock = clock
        self._silent: dict[str, tuple[float, float]] = {}  # by ephemeral pool: its last word, and since when

    # Lease

    def lease(self, name: str) -> Lease | None:
        with self._database.reading() as execute:
            return _lease(execute, name)

    def take_lease(self, name: str, holder: str, seen: Lease | None) -> Lease | None:
        """Takes a lease that has not changed since it was `seen`; None: somebody was faster."""
        with self._database.writing() as execute:
            if _lease(execute, name) != seen:
                return None
            taken = Lease(holder, seen.epoch + 1 if seen is not None else 1, 0)
            execute(
                "INSERT INTO fleet_lease (name, holder, epoch, beat) VALUES (?, ?, ?, ?) ON CONFLICT (name) "
                "DO UPDATE SET holder = excluded.holder, epoch = excluded.epoch, beat = excluded.beat",
                (name, *msgspec.structs.astuple(taken)),
            )
        return taken

    def release_lease(self, name: str, lease: Lease) -> None:
        """The next holder need not wait until it has expired."""
        with self._database.writing() as execute:
            execute("UPDATE fleet_lease SET holder = '' WHERE name = ? AND epoch = ?", (name, lease.epoch))

    @contextmanager
    def fenced(self, name: str, lease: Lease) -> Iterator[Execute]:
        """A transaction of the lease's holder, which renews it. Raises LeaseLost, and nothing is written then."""
        with self._database.writing() as execute:
            held = execute(  # the row is locked until the commit: nobody takes the lease meanwhile
                "UPDATE fleet_lease SET beat = beat + 1 WHERE name = ? AND holder = ? AND epoch = ? RETURNING beat",
                (name, lease.holder, lease.epoch),
            )
            if not held:
                raise LeaseLost(f"another process has the lease '{name}'")
            yield execute

    def write_members(self, execute: Execute, rows: Iterable[ReplicaRow], gone: Iterable[ReplicaRow]) -> None:
        """Tells gateways which replicas they have, in a fenced transaction."""
        write_members(self._database, execute, rows, gone)

    # Demand

    def write_demand(self, rows: Iterable[PoolDemand]) -> dict[str, PoolStatus]:
        """A gateway's demand; returns what controllers last said of every pool. Rows that a killed process left are
        removed."""
        with self._database.writing() as execute:
            execute("DELETE FROM fleet_demand WHERE at < ?", (self._clock() - _DEMAND_KEPT_S,))
            for row in rows:
                execute(
                    "INSERT INTO fleet_demand (gateway, pool, at, document) VALUES (?, ?, ?, ?) ON CONFLICT "
                    "(gateway, pool) DO UPDATE SET at = excluded.at, document = excluded.document",
                    (row.gateway, row.pool, row.at, _encode(row)),
                )
            found = _documents(execute, "SELECT document FROM fleet_pools", pool_status_decoder)
            for fleet in self._ended(found):
                self._remove_fleet(execute, fleet)
        return {one.pool: one for one in found if not self._is_over(one)}

    def remove_demand(self, gateway: str) -> None:
        """A gateway that ends takes its rows back."""
        with self._database.writing() as execute:
            execute("DELETE FROM fleet_demand WHERE gateway = ?", (gateway,))

    def demand(self) -> list[PoolDemand]:
        """Rows of gateways that still write."""
        with self._database.reading() as execute:
            oldest = self._clock() - DEMAND_STALE_S
            return _documents(execute, "SELECT document FROM fleet_demand WHERE at > ?", _demand_decoder, oldest)

    # Replicas, pools, decisions: written inside `fenced`

    def replicas(self) -> list[FleetReplica]:
        with self._database.reading() as execute:
            return _documents(execute, "SELECT document FROM fleet_replicas ORDER BY id", _replica_decoder)

    def pools(self) -> list[PoolStatus]:
        with self._database.reading() as execute:
            found = _documents(execute, "SELECT document FROM fleet_pools ORDER BY pool", pool_status_decoder)
        return [one for one in found if not self._is_over(one)]

    def decisions(
        self,
        pool: str | None = None,
        *,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 1000,
        is_oldest_first: bool = False,
    ) -> list[FleetDecision]:
        """Returns the decisions after `since` and until `until`; the newest first unless it is said otherwise."""
        found: dict[str, object] = {"at > ?": since, "at <= ?": until, "pool = ?": pool}
        asked = {condition: value for condition, value in found.items() if value is not None}
        order = "at" if is_oldest_first else "at DESC"
        with self._database.reading() as execute:
            rows = execute(
                f"SELECT at, pool, document FROM fleet_decisions WHERE {' AND '.join(asked)} "
                f"ORDER BY {order} LIMIT {limit:d}",
                tuple(asked.values()),
            )
        return [FleetDecision(at, of, msgspec.Raw(document.encode())) for at, of, document in rows]

    def history(self, pool: str | None = None, *, since: float = 0.0) -> list[FleetSample]:
        """Oldest first."""
        where, parameters = (" AND pool = ?", (pool,)) if pool is not None else ("", ())
        with self._database.reading() as execute:
            sql = f"SELECT document FROM fleet_history WHERE at > ?{where} ORDER BY at"
            return _documents(execute, sql, _sample_decoder, since, *parameters)

    def claim_pool(self, execute: Execute, claim: PoolStatus) -> None:
        """Makes the pool its fleet's, in a fenced transaction. Raises PoolTaken where another fleet has one of this
        name: gateways would send requests to the replicas of both."""
        execute(
            "INSERT INTO fleet_pools (pool, document) VALUES (?, ?) ON CONFLICT (pool) DO NOTHING",
            (claim.pool, _encode(claim)),
        )
        sql = "SELECT document FROM fleet_pools WHERE pool = ?"
        for owner in _documents(execute, sql, pool_status_decoder, claim.pool):
            if owner.fleet not in ("", claim.fleet) and not self._is_over(owner):
                raise PoolTaken(
                    f"the fleet '{owner.fleet}' of this store has a pool '{claim.pool}': end that fleet, give this "
                    "model another name, or use another store"
                )

    def rounds(self, pool: str, *, since: float = 0.0) -> list[str]:
        """JSON of `fleet.rounds.PolicyRound`, oldest first."""
        with self._database.reading() as execute:
            sql = "SELECT document FROM fleet_rounds WHERE pool = ? AND at > ? ORDER BY at"
            return [document for (document,) in execute(sql, (pool, since))]

    def memory(self, pool: str) -> Mapping[str, str]:
        """Returns what the controller keeps over restarts, by name: forecast, durations, the policy's memory. JSON."""
        with self._database.reading() as execute:
            return dict(execute("SELECT name, document FROM fleet_memory WHERE pool = ?", (pool,)))

    # Models that share a device

    def model_orders(self) -> dict[str, ModelOrder]:
        """Returns the orders by model."""
        with self._database.reading() as execute:
            found = _documents(execute, "SELECT document FROM model_orders", _model_order_decoder)
        return {one.model: one for one in found}

    def change_model_order(self, model: str, change: Callable[[ModelOrder], ModelOrder]) -> ModelOrder:
        """An operator's order takes the place of the one before."""
        with self._database.writing() as execute:
            sql = "SELECT document FROM model_orders WHERE model = ?"
            before = next(iter(_documents(execute, sql, _model_order_decoder, model)), ModelOrder(model))
            order = change(before)
            write_model_order(execute, order)
        return order

    # Ephemeral fleets

    def _is_over(self, status: PoolStatus) -> bool:
        return status.is_ephemeral and self._clock() - status.at > STATUS_STALE_S

    def _ended(self, statuses: Iterable[PoolStatus]) -> set[str]:
        """Fleets to be removed. Silence counts by this machine's clock, which stands still while it is suspended."""
        now = self._monotonic()
        over = [one for one in statuses if self._is_over(one)]
        before, self._silent = self._silent, {}
        for one in over:
            last, since = before.get(one.pool, (one.at, now))
            self._silent[one.pool] = (one.at, since if last == one.at else now)
        return {one.fleet for one in over if now - self._silent[one.pool][1] >= _ENDED_S}

    def _remove_fleet(self, execute: Execute, fleet: str) -> None:
        """A controller that was only paused loses its lease by this, and begins anew."""
        execute("UPDATE fleet_lease SET holder = '', epoch = epoch + 1 WHERE name = ?", (fleet,))
        for pool in _documents(execute, "SELECT document FROM fleet_pools", pool_status_decoder):
            if pool.fleet == fleet:
                remove_pool(execute, pool.pool)
        for replica in _documents(execute, "SELECT document FROM fleet_replicas", _replica_decoder):
            if replica.fleet == fleet:
                remove_replica(execute, replica.id)
        members = _documents(execute, "SELECT document FROM replicas", _member_decoder)
        self.write_members(execute, (), [row for row in members if row.by == member_author(fleet)])


def member_author(fleet: str) -> str:
    """Author of the rows by which a fleet's controller tells gateways of its replicas."""
    return f"fleet {fleet}"


def write_replica(execute: Execute, row: FleetReplica) -> None:
    execute(
        "INSERT INTO fleet_replicas (id, pool, document) VALUES (?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET pool = excluded.pool, document = excluded.document",
        (row.id, row.pool, _encode(row)),
    )


def remove_replica(execute: Execute, replica_id: str) -> None:
    execute("DELETE FROM fleet_replicas WHERE id = ?", (replica_id,))


def write_pool(execute: Execute, status: PoolStatus) -> None:
    execute(
        "INSERT INTO fleet_pools (pool, document) VALUES (?, ?) "
        "ON CONFLICT (pool) DO UPDATE SET document = excluded.document",
        (status.pool, _encode(status)),
    )


def remove_pool(execute: Execute, pool: str) -> None:
    """No controller manages it any more."""
    execute("DELETE FROM fleet_pools WHERE pool = ?", (pool,))


def write_model_order(execute: Execute, order: ModelOrder) -> None:
    execute(
        "INSERT INTO model_orders (model, document) VALUES (?, ?) "
        "ON CONFLICT (model) DO UPDATE SET document = excluded.document",
        (order.model, _encode(order)),
    )


def end_model_order(execute: Execute, done: ModelOrder, after: ModelOrder) -> None:
    """Puts `after` in the place of `done`, unless another order has come meanwhile."""
    execute(
        "UPDATE model_orders SET document = ? WHERE model = ? AND document = ?",
        (_encode(after), done.model, _encode(done)),
    )


def write_decision(execute: Execute, at: float, pool: str, document: Struct) -> None:
    """Keeps the newest of each pool."""
    execute("INSERT INTO fleet_decisions (at, pool, document) VALUES (?, ?, ?)", (at, pool, _encode(document)))
    _trim(execute, "fleet_decisions", pool, MAX_DECISIONS)


def write_round(execute: Execute, at: float, pool: str, document: Struct) -> None:
    """Keeps the newest of each pool."""
    execute("INSERT INTO fleet_rounds (at, pool, document) VALUES (?, ?, ?)", (at, pool, _encode(document)))
    _trim(execute, "fleet_rounds", pool, MAX_ROUNDS)


def write_sample(execute: Execute, sample: FleetSample) -> None:
    execute(
        "INSERT INTO fleet_history (at, pool, document) VALUES (?, ?, ?)", (sample.at, sample.pool, _encode(sample))
    )
    _trim(execute, "fleet_history", sample.pool, MAX_HISTORY)


def write_memory(execute: Execute, pool: str, name: str, document: str) -> None:
    execute(
        "INSERT INTO fleet_memory (pool, name, document) VALUES (?, ?, ?) "
        "ON CONFLICT (pool, name) DO UPDATE SET document = excluded.document",
        (pool, name, document),
    )


def _trim(execute: Execute, table: str, pool: str, most: int) -> None:
    oldest = execute(f"SELECT at FROM {table} WHERE pool = ? ORDER BY at DESC LIMIT 1 OFFSET {most:d}", (pool,))
    if oldest:
        execute(f"DELETE FROM {table} WHERE pool = ? AND at <= ?", (pool, oldest[0][0]))


def _lease(execute: Execute, name: str) -> Lease | None:
    rows = execute("SELECT holder, epoch, beat FROM fleet_lease WHERE name = ?", (name,))
    return Lease(*rows[0]) if rows else None


def _encode(row: Struct) -> str:
    return msgspec.json.encode(row).decode()


def _documents(execute: Execute, sql: str, decoder: msgspec.json.Decoder[T], *parameters: object) -> list[T]:
    """Returns the documents found. One that cannot be read was written by another version, and is left out."""
    found = []
    for (document,) in execute(sql, parameters):
        try:
            found.append(decoder.decode(document))
        except (ValueError, TypeError) as error:
            count_error("store reader", error)
    return found
