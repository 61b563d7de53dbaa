"""Usage on disk: appended once per request whatever happens, kept as sums per hour, read by day or by hour."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import astuple

from penstock.tenancy.database import MAX_ROWS, Database, Execute, placeholders

HOUR_S = 3600
DAY_S = 24 * HOUR_S
REMEMBER_S = 2 * DAY_S  # for how long a request reported again is still recognised


class Usage(Struct, frozen=True, gc=False):
    """The usage of one request, or of a part of it."""

    request_id: str  # of a part, one of its own
    tenant_id: str
    key_id: str
    model: str
    at_s: float  # when it ended, seconds since 1970
    input_tokens: int = 0  # cached ones included
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanos: int = 0
    requests: int = 1  # 0: the request goes on
    device_us: int = 0  # measured by replicas that do: see `core.request.Cost`
    kv_block_ms: int = 0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Recorder(Protocol):
    """A listener that is told what requests have used, each part of it once."""

    def record(self, usage: Usage) -> object: ...


class UsageSum(Struct, frozen=True):
    """A tenant's usage of one model within an hour, a day, or all the time that was asked about."""

    start_s: int
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int
    device_us: int = 0
    kv_block_ms: int = 0


class TenantUsage(Struct, frozen=True, gc=False):
    """A tenant's usage of one model within an hour."""

    tenant: str
    hour: int  # its beginning
    model: str
    tokens: int = 0
    device_us: int = 0


class Spent(Struct, frozen=True, gc=False):
    tokens: int = 0
    cost_nanos: int = 0
    device_us: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.tokens + other.tokens, self.cost_nanos + other.cost_nanos, self.device_us + other.device_us)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.tokens - other.tokens, self.cost_nanos - other.cost_nanos, self.device_us - other.device_us)


T = TypeVar("T")
TenantPeriod = tuple[str, str]  # a tenant's id, and a day `2026-11-15` or a month `2026-11`


NOTHING = Spent()


def periods(at_s: float) -> tuple[str, str]:
    """The day and the month, in UTC, that this time belongs to."""
    day = time.strftime("%Y-%m-%d", time.gmtime(at_s))
    return day, day[:7]


def spent_by_period(usages: Iterable[Usage]) -> dict[TenantPeriod, Spent]:
    return _spent(_sums_by_hour(usages))


class UsageBook:
    """Blocks: for commands and for threads of their own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def append(self, batch: Iterable[Usage], *, now_s: float) -> int:
        """Count each request that was not counted before; how many those were."""
        with self._database.writing() as execute:
            return count_usages(execute, batch, now_s=now_s)

    def sums(
        self, tenant_id: str, *, since_s: float, until_s: float, by: Literal["hour", "day", "all"] = "day"
    ) -> list[UsageSum]:
        """Returns sums per model and period, oldest first. `since_s` counts from the beginning of its hour."""
        start = {"hour": "hour", "day": f"hour / {DAY_S} * {DAY_S}", "all": "0"}[by]
        totals = ", ".join(f"CAST(SUM({column}) AS BIGINT)" for column in _HOUR_SUMS)
        with self._database.reading() as execute:
            rows = execute(
                f"SELECT {start} AS start_s, model, {totals} FROM usage_by_hour "
                "WHERE tenant_id = ? AND hour >= ? AND hour < ? GROUP BY 1, 2 ORDER BY 1, 2",
                (tenant_id, _hour(since_s), until_s),
            )
        return [UsageSum(*row) for row in rows]

    def by_tenant(self, *, since_s: float, until_s: float) -> list[TenantUsage]:
        """Everybody's use by hour. `since_s` counts from the beginning of its hour."""
        with self._database.reading() as execute:
            rows = execute(
                "SELECT tenant_id, hour, model, CAST(SUM(input_tokens + output_tokens) AS BIGINT), "
                "CAST(SUM(device_us) AS BIGINT) FROM usage_by_hour WHERE hour >= ? AND hour < ? "
                "GROUP BY 1, 2, 3 ORDER BY 2, 1, 3",
                (_hour(since_s), until_s),
            )
        return [TenantUsage(*row) for row in rows]

    def spending(self, names: Sequence[str], tenant_ids: Iterable[str] | None = None) -> dict[TenantPeriod, Spent]:
        """Returns the spending in these periods, of everybody or of these tenants."""
        columns = f"SELECT {', '.join((*_PERIOD_KEYS, *_PERIOD_SUMS))} FROM spending WHERE period IN "
        wanted = placeholders(1, len(names))
        with self._database.reading() as execute:
            if tenant_ids is None:
                rows = execute(columns + wanted, names)
            else:
                rows = []
                for chunk in _chunks(tenant_ids):
                    sql = f"{columns}{wanted} AND tenant_id IN {placeholders(1, len(chunk))}"
                    rows += execute(sql, (*names, *chunk))
        return {(tenant_id, period): Spent(*sums) for tenant_id, period, *sums in rows}

    def forget_settled(self, *, now_s: float) -> None:
        """Let go of request ids that nobody reports again; the sums stay."""
        with self._database.writing() as execute:
            execute("DELETE FROM settled_requests WHERE settled_at < ?", (int(now_s - REMEMBER_S),))


def count_usages(execute: Execute, batch: Iterable[Usage], *, now_s: float) -> int:
    """Does what `UsageBook.append` does, inside somebody's transaction."""
    usages = {usage.request_id: usage for usage in batch}
    # Rows are locked in one order by everybody, or two gateways could wait for each other for ever.
    ordered = [usages[request_id] for request_id in sorted(usages)]
    new = [usage for chunk in _chunks(ordered) for usage in _not_seen(execute, chunk, now_s)]
    by_hour = _sums_by_hour(new)
    _add(execute, "usage_by_hour", _HOUR_KEYS, _HOUR_SUMS, by_hour)
    by_period = {key: astuple(spent) for key, spent in _spent(by_hour).items()}
    _add(execute, "spending", _PERIOD_KEYS, _PERIOD_SUMS, by_period)
    return len(new)


_HOUR_KEYS = ("tenant_id", "hour", "model", "key_id")
_HOUR_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos", "device_us", "kv_block_ms")
_PERIOD_KEYS = ("tenant_id", "period")
_PERIOD_SUMS = ("tokens", "cost_nanos", "device_us")  # the fields of `Spent`

Sums = dict[tuple[str, int, str, str], list[int]]


def _not_seen(execute: Execute, usages: Sequence[Usage], now_s: float) -> Iterator[Usage]:
    rows = execute(
        f"INSERT INTO settled_requests (request_id, settled_at) VALUES {placeholders(len(usages), 2)} "
        "ON CONFLICT DO NOTHING RETURNING request_id",
        [value for usage in usages for value in (usage.request_id, int(now_s))],
    )
    new = {request_id for (request_id,) in rows}
    return (usage for usage in usages if usage.request_id in new)


def _sums_by_hour(usages: Iterable[Usage]) -> Sums:
    """Returns sums in the order of _HOUR_SUMS. The code is plain, since it runs once for every request there is."""
    sums: Sums = {}
    for usage in usages:
        key = (usage.tenant_id, _hour(usage.at_s), usage.model, usage.key_id)
        if (total := sums.get(key)) is None:
            total = sums[key] = [0] * len(_HOUR_SUMS)
        total[0] += usage.requests
        total[1] += usage.input_tokens
        total[2] += usage.cached_tokens
        total[3] += usage.output_tokens
        total[4] += usage.cost_nanos
        total[5] += usage.device_us
        total[6] += usage.kv_block_ms
    return sums


def _spent(by_hour: Sums) -> dict[TenantPeriod, Spent]:
    """Days and months are made of hours."""
    spent: dict[TenantPeriod, Spent] = {}
    for (tenant_id, hour, *_), (_, input_tokens, _, output_tokens, cost_nanos, device_us, _) in by_hour.items():
        used = Spent(input_tokens + output_tokens, cost_nanos, device_us)
        for period in periods(hour):
            spent[tenant_id, period] = spent.get((tenant_id, period), NOTHING) + used
    return spent


def _add(
    execute: Execute, table: str, keys: Sequence[str], columns: Sequence[str], sums: Mapping[Any, Sequence[int]]
) -> None:
    """Add to the rows that are there, or make them."""
    updates = ", ".join(f"{column} = {table}.{column} + excluded.{column}" for column in columns)
    for chunk in _chunks(sorted(sums)):
        execute(
            f"INSERT INTO {table} ({', '.join((*keys, *columns))}) "
            f"VALUES {placeholders(len(chunk), len(keys) + len(columns))} "
            f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {updates}",
            [value for key in chunk for value in (*key, *sums[key])],
        )


def _hour(at_s: float) -> int:
    return int(at_s) // HOUR_S * HOUR_S


def _chunks(values: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(values)
    while chunk := list(islice(remaining, MAX_ROWS)):
        yield chunk
