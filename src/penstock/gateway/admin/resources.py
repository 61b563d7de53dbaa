"""Resources of the admin API in the store, as the commands have them. Blocking: it runs in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import BodyTooLarge, InvalidRequest, InvalidValue
from penstock.http.message import Request
from penstock.tenancy.documents import UsageReport, key_document, new_key_document, step_from, tenant_document
from penstock.tenancy.keys import key_id_of
from penstock.tenancy.store import Store
from penstock.tenancy.times import moment

T = TypeVar("T")

Shape = tuple[str | None, ...]

MAX_BODY_BYTES = 64 << 10
_YEAR_S = 366 * 86400.0
_fields_decoder = msgspec.json.Decoder(dict[str, Any])


class Answer(NamedTuple):
    status: int
    document: object = None  # None: no body


class KeyAsked(Struct, forbid_unknown_fields=True):
    name: str = ""
    expires_in_s: Annotated[float, Meta(gt=0, le=100 * _YEAR_S)] | None = None


_key_asked_decoder = msgspec.json.Decoder(KeyAsked)


class RotationAsked(Struct, forbid_unknown_fields=True):
    grace_s: Annotated[float, Meta(ge=0, le=_YEAR_S)] = 0.0


_rotation_asked_decoder = msgspec.json.Decoder(RotationAsked)


class AdminCall:
    """A request under /admin/v1 or /v1/penstock: what is asked of which resource."""

    def __init__(self, request: Request, admin: str = "", in_flight: Mapping[str, int] = {}) -> None:
        """`in_flight`: requests of this gateway, by pool."""
        parts = [unquote(part) for part in request.path.decode(errors="replace").strip("/").split("/")]
        self.method = request.method.decode(errors="replace")
        self.path = tuple(parts[2:])
        self.admin = admin  # who asks
        self.in_flight = in_flight
        self._request = request

    @property
    def shape(self) -> Shape:
        """The path with a gap where the name of one of many stands."""
        return tuple(None if index == 1 else part for index, part in enumerate(self.path))

    @property
    def name(self) -> str:
        return self.path[1]

    def body(self, decoder: msgspec.json.Decoder[T]) -> T:
        body = self._request.body
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            return decoder.decode(body or b"{}")
        except msgspec.ValidationError as error:
            raise InvalidValue(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from None

    def query(self, *known: str) -> dict[str, str]:
        found = parse_qs(self._request.query.decode(errors="replace"), keep_blank_values=True)
        for name in found:
            if name not in known:
                raise InvalidValue(f"no such parameter: it is one of {', '.join(known)}", param=name)
        return {name: values[-1] for name, values in found.items()}


Action = Callable[[Store, AdminCall], Answer]


def _add_tenant(store: Store, call: AdminCall) -> Answer:
    return Answer(201, tenant_document(store.add_tenant(_tenant_fields(call))))


def _change_tenant(store: Store, call: AdminCall) -> Answer:
    return Answer(200, tenant_document(store.update_tenant(call.name, _tenant_fields(call))))


def _tenant_fields(call: AdminCall) -> dict[str, Any]:
    values = call.body(_fields_decoder)
    if "created_at" in values:
        raise InvalidValue("when a tenant was made is not for anybody to say", param="created_at")
    return values


def _remove_tenant(store: Store, call: AdminCall) -> Answer:
    store.remove_tenant(call.name)
    return Answer(204)


def _create_key(store: Store, call: AdminCall) -> Answer:
    asked = call.body(_key_asked_decoder)
    expires_at = None if asked.expires_in_s is None else time.time() + asked.expires_in_s
    return Answer(201, new_key_document(store.create_key(call.name, name=asked.name, expires_at=expires_at)))


def _rotate_key(store: Store, call: AdminCall) -> Answer:
    grace_s = call.body(_rotation_asked_decoder).grace_s
    return Answer(201, new_key_document(store.rotate_key(key_id_of(call.name), grace_s=grace_s)))


def _usage(store: Store, call: AdminCall) -> Answer:
    query = call.query("since", "until", "by")
    since_s, until_s = (moment(query[name]) if name in query else None for name in ("since", "until"))
    by = step_from(query.get("by", "day"))
    return Answer(200, UsageReport(store, call.name, by=by, since_s=since_s, until_s=until_s).document())


RESOURCES: dict[Shape, dict[str, Action]] = {
    ("tenants",): {
        "GET": lambda store, call: Answer(200, {"tenants": [tenant_document(one) for one in store.tenants()]}),
        "POST": _add_tenant,
    },
    ("tenants", None): {
        "GET": lambda store, call: Answer(200, tenant_document(store.tenant(call.name))),
        "PATCH": _change_tenant,
        "DELETE": _remove_tenant,
    },
    ("tenants", None, "keys"): {
        "GET": lambda store, call: Answer(200, {"keys": [key_document(one) for one in store.keys(call.name)]}),
        "POST": _create_key,
    },
    ("tenants", None, "usage"): {"GET": _usage},
    ("keys",): {"GET": lambda store, call: Answer(200, {"keys": list(map(key_document, store.keys()))})},
    ("keys", None): {
        "DELETE": lambda store, call: Answer(200, key_document(store.revoke_key(key_id_of(call.name)))),
    },
    ("keys", None, "rotate"): {"POST": _rotate_key},
}
