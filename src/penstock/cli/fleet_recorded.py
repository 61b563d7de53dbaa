"""A pool as the store has recorded it: demand by the minute, rounds of its policy, and the settings that it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.cli.config_file import read_config_file
from penstock.cli.store_flags import show_time, store_url
from penstock.core.config import build, nearest
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Decision
from penstock.fleet.rounds import PolicyRound, read_rounds
from penstock.fleet.settings import FleetSettings, PoolSettings
from penstock.tenancy.fleet import MAX_DECISIONS, FleetSample
from penstock.tenancy.store import open_store

_decision_decoder = msgspec.json.Decoder(Decision)


class RecordedPool(NamedTuple):
    name: str
    samples: list[FleetSample]
    rounds: list[PolicyRound]  # oldest first, as decisions
    decisions: list[Decision]
    settings: PoolSettings
    slo: Slo


def read_recorded(pool: str | None, since: float, *, store: str | None, config: Path | None) -> RecordedPool:
    """Returns a pool's records. Without a file the settings are those that it was last run with."""
    with open_store(store_url(store, config)) as opened:
        samples = opened.fleet.history(since=since)
        configured = _configured(config) if config is not None else {}
        name = _choose(pool, sorted({each.pool for each in samples}), list(configured), since)
        rounds = read_rounds(opened.fleet.rounds(name, since=since))
        kept = opened.fleet.decisions(name, since=since, limit=MAX_DECISIONS, is_oldest_first=True)
    decisions = [_decision_decoder.decode(each.document) for each in kept]
    if not rounds:
        raise ConfigError(f"no round of the policy for '{name}' is recorded since {show_time(since)}", param="pool")
    last = rounds[-1]
    settings, slo = configured.get(name) or (build(PoolSettings, last.settings), build(Slo, last.slo))
    if settings.parked is None and last.settings.get("parked") == 0:
        settings = replace(settings, parked=0)  # its replicas have told that they cannot be parked
    return RecordedPool(name, [each for each in samples if each.pool == name], rounds, decisions, settings, slo)


def _configured(config: Path) -> dict[str, tuple[PoolSettings, Slo]]:
    file = read_config_file(config)
    with file.located():
        settings = build(FleetSettings, file.values)
        return {name: (pool, settings.slo_of(name, pool)) for name, pool in settings.pool_settings().items()}


def _choose(pool: str | None, recorded: list[str], configured: list[str], since: float) -> str:
    if pool is None:
        known = configured or recorded
        if len(known) > 1:
            raise ConfigError(f"which pool? There are {', '.join(known)}", param="pool")
        pool = known[0] if known else None
    if pool in recorded:
        return pool
    if pool is not None and pool not in configured and (recorded or configured):
        hint = nearest(pool, [*configured, *recorded])
        there = f"did you mean '{hint}'?" if hint else f"there are {', '.join(configured or recorded)}"
        raise ConfigError(f"no pool '{pool}'; {there}", param="pool")
    of_pool = f" of '{pool}'" if pool is not None else ""
    raise ConfigError(f"no demand{of_pool} is recorded since {show_time(since)}", param="since")
