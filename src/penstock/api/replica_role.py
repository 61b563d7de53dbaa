"""A replica's role over HTTP: what gateways send to it can change while it runs.

POST /v1/penstock/role    {"role": "prefill"}: answered with a snapshot that has it
"""

from __future__ import annotations

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.settings import Role

ROLE_PATH = "/v1/penstock/role"


class RoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role


_decode = msgspec.json.Decoder(RoleRequest).decode


def read_role_request(body: bytes) -> RoleRequest:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"expected role, one of both, prefill and decode: {error}", param="role") from None
