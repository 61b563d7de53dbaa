"""Where the KV events of servers that are not penstock's are to be had: ZMQ ports beside their HTTP port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from penstock.gateway.replicas.zmq_events import EventSource

Port = Annotated[int, Meta(ge=1, le=65535)]


@dataclass(frozen=True)
class KvEventSettings:
    port: Port = 5557  # of the first data-parallel rank; the others follow
    replay_port: Port | None = None
    topic: str = ""
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 1

    def sources(self, replica_id: str, url: str) -> list[EventSource]:
        host = urlsplit(url).hostname or ""
        bare = f"[{host}]" if ":" in host else host
        return [
            EventSource(
                replica_id,
                f"tcp://{bare}:{self.port + rank}",
                f"tcp://{bare}:{self.replay_port + rank}" if self.replay_port is not None else None,
                self.topic,
            )
            for rank in range(self.ranks)
        ]
