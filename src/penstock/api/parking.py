"""Parking over HTTP: what a replica is asked, and what it answers when it is parked or awake.

POST /v1/penstock/park    {"wait_s": 30}: how long open requests may take to end or to go elsewhere
POST /v1/penstock/wake    answered when a real token has come out
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.core.errors import InvalidRequest

PARK_PATH = "/v1/penstock/park"
WAKE_PATH = "/v1/penstock/wake"


class ParkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0


class ParkReport(msgspec.Struct, frozen=True):
    state: str  # parked, or ready
    seconds: dict[str, float] = {}  # what was done, phase by phase; empty: it was so already
    num_bytes: int = 0  # of the device's memory: given back, or taken again


_decode = msgspec.json.Decoder(ParkRequest).decode


def read_park_request(body: bytes) -> ParkRequest:
    try:
        return _decode(body) if body else ParkRequest()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected wait_s, in seconds: {error}") from None
