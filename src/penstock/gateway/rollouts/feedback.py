"""POST /v1/penstock/feedback: what a user thinks of an answer, by the id of the request.

It is kept under the caller's tenant, whoever answered the request; a gateway that gave the answer, to this tenant,
counts it for the version. Another tenant's request id is taken like one that nobody knows: it tells nothing.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import BodyTooLarge, InvalidRequest, InvalidValue
from penstock.gateway.rollouts.writer import Said

PATH = b"/v1/penstock/feedback"
MAX_BODY_BYTES = 16 << 10
ACCEPTED = b'{"accepted":true}'
_WORDS = {"good": 1.0, "bad": 0.0}


class _Given(Struct, forbid_unknown_fields=True):
    request_id: Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+\Z")]
    score: Annotated[float, Meta(ge=-1, le=1)] | Literal["good", "bad"]
    comment: Annotated[str, Meta(max_length=2000)] = ""


_given_decoder = msgspec.json.Decoder(_Given)


def read_feedback(tenant: str, body: bytes) -> Said:
    """Raises what is wrong with it."""
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        given = _given_decoder.decode(body or b"{}")
    except msgspec.ValidationError as error:
        raise InvalidValue(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if "\0" in given.comment:
        raise InvalidValue("comment: a NUL character cannot be kept", param="comment")
    if isinstance(given.score, str):
        return Said(tenant, given.request_id, _WORDS[given.score], given.comment)
    if not isfinite(given.score):
        raise InvalidValue("score: expected a number from -1 to 1", param="score")
    return Said(tenant, given.request_id, (given.score + 1.0) / 2.0, given.comment)
