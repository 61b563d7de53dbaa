"""One replica as a source names it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.settings.gateway import ModelSettings

FILE = "file"
_OF_A_REPLICA = (
    "served_as",
    "dialect",
    "kv_events",
    "key_env",
    "secret_env",
    "ca_file",
    "server_name",
    "client_cert",
    "client_key",
    "probe_every_s",
    "deep_probe_every_s",
    "send_priority",
    "forward_fields",
    "stream_usage",
    "role",
    "bootstrap_port",
    "kv_layout",
)


@dataclass(frozen=True)
class Member:
    pool: str
    url: str
    settings: ModelSettings  # of its pool, with what is its own
    is_draining: bool = False
    state: str = ""  # of one that a controller keeps without traffic (`tenancy.replicas.RESTING`)
    source: str = FILE  # the name of the first that has it

    def is_reached_as(self, other: Member) -> bool:
        """Whether a replica that was made for one of them will do for the other."""
        return all(getattr(self.settings, name) == getattr(other.settings, name) for name in _OF_A_REPLICA)

    @property
    def key(self) -> tuple[str, str]:
        return self.pool, self.url

    @property
    def long_id(self) -> str:
        """The id of a server that is in several pools: one provider may have many models."""
        return f"{self.url}#{self.pool}"
