"""Settings of the watch: the group `watch` of a gateway's file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from penstock.core.settings import Count, setting
from penstock.core.slo import Seconds
from penstock.watch.answers import TOLERANCE
from penstock.watch.kinds import RUNBOOKS

Period = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class AlertSettings:
    log: bool = setting(True, "a line in the log when an alert begins and when it is over")
    webhook: str | None = setting(None, "URL that messages go to, in the form of Alertmanager's webhook")
    slack: str | None = setting(None, "URL of a Slack-style webhook")
    slack_env: str | None = setting(None, "or the environment variable that has it: it is a secret")
    group_wait_s: Period = setting(10.0, "how long others of the same alert and model are waited for")
    group_interval_s: Period = setting(60.0, "how long after a message more of the same are told")
    repeat_every_s: Seconds = setting(14400.0, "how often what goes on is told again")
    hold_s: Period = setting(60.0, "what has stopped for so long is over")
    runbooks: str = setting(RUNBOOKS, "where messages, the admin API and the console say that the runbooks are: a URL")


@dataclass(frozen=True)
class ProbeSettings:
    every_s: Period = setting(60.0, "how often every replica is asked a known question; 0: never")
    timeout_s: Seconds = setting(15.0, "how long it has for the answer")
    tokens: Count = setting(16, "how many tokens of the answer are compared")
    tolerance: Seconds = setting(TOLERANCE, "how far a log-probability may be from the known one")
    adapters: dict[str, list[str]] = field(
        default_factory=dict, metadata={"help": "by model, adapters that are asked too, by the names clients use"}
    )


@dataclass(frozen=True)
class WatchSettings:
    sample_s: Seconds = setting(60.0, "how long replicas are measured before they are compared")
    penalties: bool = setting(True, "a replica that is slower than its siblings, or wrong, gets less of the traffic")
    alerts: AlertSettings = field(default_factory=AlertSettings)
    probes: ProbeSettings = field(default_factory=ProbeSettings)
