"""Settings of health: the group `health` of a gateway's file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from penstock.core.replica import STALE_AFTER_S
from penstock.core.settings import Count, setting
from penstock.core.slo import Seconds
from penstock.health.breaker import BreakerSettings
from penstock.health.slow_start import SlowStartSettings

Period = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class HealthSettings:
    silent_after_s: Seconds = setting(
        3.0, "a penstock replica that sends no report for so long is out; after a third of it, others are preferred"
    )
    hung_after_s: Seconds = setting(10.0, "one that has work and makes no step for so long hangs, whatever it answers")
    probe_every_s: Seconds = setting(5.0, "how often servers that send no reports are asked")
    probe_timeout_s: Seconds = setting(5.0, "how long such a server has for its answer")
    deep_probe_every_s: Period = setting(
        60.0, "a penstock replica that made no step for so long is asked for a token; 0: only if it hung"
    )
    deep_probe_timeout_s: Seconds = setting(15.0, "how long a replica has for that token")
    out_after: Count = setting(3, "failed probes in a row that take a replica out")
    back_after: Count = setting(2, "passed probes in a row that bring it back; the very first time one is enough")
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    slow_start: SlowStartSettings = field(default_factory=SlowStartSettings)

    @property
    def stale_after_s(self) -> float:
        """The silence after which a penstock replica's numbers, and what is known of its KV cache, are old."""
        return max(STALE_AFTER_S, self.silent_after_s / 3)
