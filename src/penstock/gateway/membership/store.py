"""The replicas that the store names: added by commands, by the admin API, or by a controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.core.config import build
from penstock.core.errors import ConfigError, InvalidValue
from penstock.gateway.membership.factory import check_dialect
from penstock.gateway.membership.member import Member
from penstock.gateway.settings.gateway import ModelSettings
from penstock.observe.redaction import redact
from penstock.router.routes import version_of
from penstock.tenancy.replicas import OPTIONS, RESTING, ReplicaRow

log = logging.getLogger(__name__)


class StoreSource:
    """Belongs to the event loop's thread; the follower's thread hands rows over there."""

    name = "store"

    def __init__(self) -> None:
        self._rows: tuple[ReplicaRow, ...] = ()
        self.changed: Callable[[], None] = lambda: None

    def apply(self, rows: Iterable[ReplicaRow]) -> None:
        """All there are."""
        self._rows = tuple(rows)
        self.changed()

    def members(self, pools: Mapping[str, ModelSettings]) -> Iterator[Member]:
        for row in self._rows:
            try:
                settings = settings_of(row, pools.get(row.model))
                yield Member(row.model, row.url, settings, row.is_draining, row.state if row.state in RESTING else "")
            except ConfigError as error:
                log.error("%s is no replica of %s: %s", redact(row.url), row.model, error.message)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises InvalidValue."""
    try:
        check_dialect(settings_of(ReplicaRow("m", "", options=dict(options)), None).dialect)
    except ConfigError as error:
        raise InvalidValue(error.message, param=error.param) from None


def settings_of(row: ReplicaRow, pool: ModelSettings | None) -> ModelSettings:
    """Those of its pool, with its own options over them; a pool that the file does not name has the defaults."""
    for option in row.options:
        if option not in OPTIONS:
            raise ConfigError(f"'{option}' is no option of a replica: {', '.join(OPTIONS)}", param=option)
    if pool is None:
        pool = ModelSettings(served_as=version_of(row.model)[0])
    built = build(ModelSettings, row.options)
    return replace(pool, **{option: getattr(built, option) for option in row.options})
