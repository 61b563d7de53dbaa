"""Settings of WebSockets: the group `websocket` of a gateway's file; a replica has the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.core.settings import setting

Count = Annotated[int, Meta(ge=1)]
Wait = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class WebSocketSettings:
    max_sockets: Annotated[int, Meta(ge=0)] = setting(2048, "sockets of a process; 0: it takes none")
    max_sockets_per_tenant: Count = setting(256, "of these, one tenant's")
    max_requests: Count = setting(32, "requests of a socket that are open at a time, those that wait for another too")
    max_message_bytes: Annotated[int, Meta(ge=1024, le=8 << 20)] = setting(
        2 << 20, "largest message; larger requests are for HTTP"
    )
    auth_timeout_s: Wait = setting(10.0, "how long a socket may be open without a key")
    message_timeout_s: Wait = setting(60.0, "how long a message may take to arrive")
    idle_timeout_s: Wait = setting(900.0, "a socket without a request for so long is closed")
    ping_every_s: Wait = setting(20.0, "a client that says nothing for so long is sent a ping")
    pong_timeout_s: Wait = setting(20.0, "and is dropped if it says nothing for so long after that")
