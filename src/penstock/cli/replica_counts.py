"""The counts of replicas that `penstock serve` starts, by role: `--replicas 2`, `1..4`, or `prefill=1,decode=2`."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import NamedTuple, get_args

from penstock.core.errors import ConfigError
from penstock.core.settings import Role, Settings

FORMS = "N|MIN..MAX|ROLE=N,…"
_ROLES: tuple[Role, ...] = get_args(Role)


class ReplicaCounts(NamedTuple):
    fewest: int
    most: int
    roles: tuple[Role, ...] = ()  # of each, where roles were named

    @property
    def is_range(self) -> bool:
        return self.fewest < self.most

    @property
    def each_role(self) -> tuple[Role, ...]:
        """A role for each replica, where the number is fixed."""
        plain: tuple[Role, ...] = ("both",)
        return self.roles or plain * self.most

    def __str__(self) -> str:
        """The counts in words, with roles where there are any."""
        named = ", ".join(f"{count} {role}" for role, count in Counter(self.roles).items())
        plural = "" if self.most == 1 else "s"
        return f"{self.most} replica{plural} ({named})" if named else f"{self.most} replica{plural}"


def replica_counts(text: str) -> ReplicaCounts:
    """Raises as argparse wants a type to."""
    if "=" in text:
        return _by_role(text)
    fewest, _, most = text.partition("..")
    try:
        found = ReplicaCounts(int(fewest), int(most or fewest))
    except ValueError:
        found = ReplicaCounts(0, 0)
    if not 0 <= found.fewest <= found.most or not found.most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number, nor a range such as 1..4, nor roles such as prefill=1,decode=2"
        )
    return found


def _by_role(text: str) -> ReplicaCounts:
    counts: dict[Role, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        role = next((one for one in _ROLES if one == name.strip()), None)
        if role is None or role in counts or not number.strip().isdecimal():
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r}: each part is ROLE=N, with one of {', '.join(_ROLES)}; a range has no roles"
            )
        counts[role] = int(number)
    roles = tuple(role for role, count in counts.items() for _ in range(count))
    if not any(role != "prefill" for role in roles):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no replica that answers: prefill ones compute prompts for others; add decode=1 or both=1"
        )
    return ReplicaCounts(len(roles), len(roles), roles)


def check_counts(settings: Settings, counts: ReplicaCounts) -> None:
    """Settings that several replicas of one machine cannot share. Raises ConfigError."""
    if counts.most < 2:
        return
    if settings.server.role != "both":
        raise ConfigError(
            f"role is of one replica: say --replicas {settings.server.role}=1,decode=1 for several of this machine",
            param="role",
        )
    if settings.engine.kv_port:
        raise ConfigError(
            "several replicas cannot have one kv_port: leave it out, and each picks its own", param="kv_port"
        )
