"""Settings of a pool that somebody asks about: `min=2,slo.ttft_s=0.5` over those that the pool has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from penstock.core.config import build
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.fleet.rounds import UNUSED
from penstock.fleet.settings import PoolSettings

_SPEED = "speed"  # of a replica, as a multiple of those that there are; not a setting
_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # those of a list are its own


class Alternative(NamedTuple):
    name: str
    settings: PoolSettings
    slo: Slo
    speed: float = 1.0


def parse_alternative(text: str, settings: PoolSettings, slo: Slo, *, name: str = "") -> Alternative:
    """`text`: names of settings as in fleet.yaml, dotted where they are nested, with values in YAML."""
    pool = {key: value for key, value in dataclasses.asdict(settings).items() if key not in UNUSED}
    values: dict[str, Any] = {**pool, "slo": dataclasses.asdict(slo), _SPEED: 1.0}
    for part in _COMMA.split(text):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{part}' is not NAME=VALUE", param="set")
        _assign(values, key.strip().split("."), _value(part, value))
    objectives, speed = values.pop("slo"), values.pop(_SPEED)
    if not isinstance(objectives, dict):
        raise ConfigError("the SLO has parts: slo.ttft_s, slo.tpot_s, …", param="slo")
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not speed > 0:
        raise ConfigError(f"speed is a positive number, and not {speed!r}", param=_SPEED)
    try:
        made = build(PoolSettings, values), build(Slo, objectives, where="slo.")
    except ConfigError as error:
        raise ConfigError(f"{text}: {error.message}", param=error.param) from None
    return Alternative(name or text, *made, float(speed))


def device_kind(text: str, settings: PoolSettings, slo: Slo) -> Alternative:
    """`h100=2.5,1.8`: replicas on another kind of device cost so much an hour, and are so many times as fast."""
    name, equals, rest = text.partition("=")
    price, comma, speed = rest.partition(",")
    if not equals or not name or not price:
        raise ConfigError(f"'{text}' is not NAME=PRICE or NAME=PRICE,SPEED", param="device_kind")
    return parse_alternative(f"price_per_hour={price},{_SPEED}={speed if comma else 1}", settings, slo, name=name)


def _assign(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if path[0] in UNUSED - {"slo"}:
        raise ConfigError(f"'{'.'.join(path)}' says nothing about how many replicas there are", param=path[0])
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"'{key}' has no parts, and so there is no '{'.'.join(path)}'", param=key)
    values[path[-1]] = value


def _value(part: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"the value of '{part}' is not YAML", param="set") from None
