"""The admin API over HTTP, in front of a real SQLite store."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.gateway.admin.api import AdminApi
from penstock.gateway.admin.guard import Guard
from penstock.gateway.admin.resources import Shape
from penstock.gateway.admin.routes import View
from penstock.gateway.monitor.state import GatewayState
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.http.server import Server, bound_socket
from penstock.tenancy.admins import AdminRing, new_admin_key
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.store import Store, open_store
from penstock.tenancy.usage import Usage
from tests.waiting import GIVE_UP_S

ADMIN = new_admin_key("root", now_s=0)


@dataclass
class Administered:
    port: int
    store: Store

    def ask(
        self, method: str, path: str, body: object = None, key: str | None = ADMIN.secret, **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=GIVE_UP_S)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        with contextlib.closing(connection):
            connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        is_json = answer.headers.get("content-type") == "application/json"
        return answer.status, json.loads(content) if content and is_json else content


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Administered]:
    path: Path = tmp_path_factory.mktemp("admin") / "tenants.db"
    stop: list[Any] = []
    ports: list[int] = []
    ready = threading.Event()

    async def serve() -> None:
        admins = AdminRing()
        admins.apply([ADMIN.record])
        with open_store(f"sqlite:///{path}") as store:
            guard = Guard(admins, KeyRing(), is_loopback=True)
            views: Mapping[Shape, View] = {("routes",): lambda call: {"routes": []}}
            api = AdminApi(store, guard, GatewayRecorder(), lambda: GatewayState([], []), views, has_own_port=False)
            server, listener, stopped = Server(api), bound_socket("127.0.0.1", 0), asyncio.Event()
            await server.listen(listener)
            ports.append(listener.getsockname()[1])
            stop.append((asyncio.get_running_loop(), stopped))
            ready.set()
            await stopped.wait()
            await server.stop(0.1)
            api.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    assert ready.wait(GIVE_UP_S)
    with open_store(f"sqlite:///{path}") as store:
        yield Administered(ports[0], store)
    loop, stopped = stop[0]
    loop.call_soon_threadsafe(stopped.set)
    thread.join(GIVE_UP_S)


@pytest.fixture
def acme(api: Administered) -> Iterator[Administered]:
    assert api.ask("POST", "/admin/v1/tenants", {"id": "acme", "limits": {"concurrency": 3}})[0] == 201
    yield api
    assert api.ask("DELETE", "/admin/v1/tenants/acme") == (204, b"")


def test_a_tenants_life(acme: Administered) -> None:
    status, tenant = acme.ask("GET", "/admin/v1/tenants/acme")
    assert (status, tenant["limits"]["concurrency"], tenant["models"]) == (200, 3, ["*"])
    change = {"limits": {"concurrency": None, "max_output": 7}, "is_active": False}
    status, changed = acme.ask("PATCH", "/admin/v1/tenants/acme", change)
    assert (status, changed["limits"]["concurrency"], changed["limits"]["max_output"]) == (200, None, 7)
    assert acme.ask("GET", "/admin/v1/tenants") == (200, {"tenants": [changed]})
    assert acme.store.tenant("acme").is_active is False


def test_a_key_is_shown_once_rotated_and_revoked(acme: Administered) -> None:
    status, first = acme.ask("POST", "/admin/v1/tenants/acme/keys", {"name": "laptop", "expires_in_s": 3600})
    assert (status, first["name"], first["expires_at"] - first["created_at"]) == (201, "laptop", pytest.approx(3600, 1))
    status, second = acme.ask("POST", f"/admin/v1/keys/{first['id']}/rotate", {"grace_s": 60})
    assert status == 201
    status, revoked = acme.ask("DELETE", f"/admin/v1/keys/psk_{second['id']}")
    assert (status, revoked["revoked_at"] is not None) == (200, True)
    listed = [acme.ask("GET", path) for path in ("/admin/v1/tenants/acme/keys", "/admin/v1/keys")]
    assert [len(answer["keys"]) for _, answer in listed] == [2, 2]
    for key in (first, second):
        assert key["key"].startswith(f"psk_{key['id']}_")
        assert key["key"].rpartition("_")[2] not in repr(listed)
    assert "hash" not in repr(listed) + repr(first)
    assert acme.ask("POST", f"/admin/v1/keys/{second['id']}/rotate")[0] == 409


def test_usage_is_summed_as_the_command_does(acme: Administered) -> None:
    at_s = 1_794_744_000  # 2026-11-15 12:00 UTC
    acme.store.usage.append([Usage("r", "acme", "k", "m", at_s, 10, 4, 5, 1_500_000_000, 1, 250_000, 30)], now_s=at_s)
    status, answer = acme.ask("GET", "/admin/v1/tenants/acme/usage?since=2026-11-15&until=2026-11-16&by=all")
    counts = {
        "requests": 1,
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "device_s": 0.25,
        "kv_block_s": 0.03,
        "cost": 1.5,
    }
    assert status == 200
    assert answer == {
        "tenant": "acme",
        "since": "2026-11-15T00:00:00Z",
        "usage": [{"model": "m", **counts}],
        "total": counts,
    }


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "tenants", {"id": "acme"}, 409, "conflict"),
        ("POST", "tenants", {"id": "Not An Id"}, 422, "invalid_value"),
        ("POST", "tenants", {"id": "b", "limits": {"concurency": 1}}, 422, "invalid_value"),
        ("POST", "tenants", {"id": "b", "created_at": 1}, 422, "invalid_value"),
        ("POST", "tenants", {}, 422, "invalid_value"),
        ("POST", "tenants", [], 422, "invalid_value"),
        ("POST", "tenants", b"{", 400, "invalid_request"),
        ("POST", "tenants", b'{"x":' * 5000, 400, "invalid_request"),
        ("POST", "tenants", b'{"id": "\\ud800"}', 400, "invalid_request"),
        ("POST", "tenants", b" " * 70_000, 413, "body_too_large"),
        ("PATCH", "tenants/acme", {"limits": {"concurrency": 0}}, 422, "invalid_value"),
        ("PATCH", "tenants/acme", {"id": "other"}, 422, "invalid_value"),
        ("PATCH", "tenants/nobody", {}, 404, "tenant_not_found"),
        ("GET", "tenants/%0a%00", None, 404, "not_found"),
        ("DELETE", "tenants/nobody", None, 404, "tenant_not_found"),
        ("POST", "tenants/nobody/keys", {}, 404, "tenant_not_found"),
        ("POST", "tenants/acme/keys", {"expires_in_s": -1}, 422, "invalid_value"),
        ("POST", "tenants/acme/keys", {"nmae": "x"}, 422, "invalid_value"),
        ("POST", "tenants/acme/keys", {"name": "a\nb"}, 422, "invalid_value"),
        ("DELETE", "keys/psk_0123456789", None, 404, "key_not_found"),
        ("DELETE", "keys/what", None, 422, "invalid_value"),
        ("GET", "tenants/nobody/usage", None, 404, "tenant_not_found"),
        ("GET", "tenants/acme/usage?by=week", None, 422, "invalid_value"),
        ("GET", "tenants/acme/usage?since=yesterday", None, 422, "invalid_value"),
        ("GET", "tenants/acme/usage?from=1d", None, 422, "invalid_value"),
        ("PUT", "tenants/acme", {}, 405, "method_not_allowed"),
        ("PUT", "replicas", {}, 405, "method_not_allowed"),
        ("POST", "replicas", {}, 422, "invalid_value"),
        ("POST", "replicas", {"model": "m", "url": "nowhere"}, 422, "invalid_value"),
        ("POST", "replicas", {"model": "m", "url": "http://a", "options": {"wieght": 1}}, 422, "invalid_value"),
        ("DELETE", "replicas", {"url": "http://a"}, 404, "replica_not_found"),
        ("PATCH", "replicas", {"url": "http://a", "draining": True}, 404, "replica_not_found"),
        ("GET", "tenants/acme/keys/x", None, 404, "not_found"),
        ("GET", "secrets", None, 404, "not_found"),
    ],
)
def test_what_is_wrong_is_told_in_the_usual_way(
    acme: Administered, method: str, path: str, body: object, status: int, code: str
) -> None:
    found, answer = acme.ask(method, f"/admin/v1/{path}", body)
    assert (found, answer["error"]["code"]) == (status, code)


@pytest.mark.parametrize("path", ["/admin/v1/tenants", "/admin/v1/replicas", "/admin/v1/nothing", "/metrics"])
def test_nothing_is_told_without_an_admins_key(acme: Administered, path: str) -> None:
    _, tenant_key = acme.ask("POST", "/admin/v1/tenants/acme/keys")
    assert acme.ask("GET", path, key=None)[0] == 401
    assert acme.ask("GET", path, key=tenant_key["key"])[0] == 403
    assert acme.ask("GET", path, key=ADMIN.secret + "x")[0] == 401
    assert acme.ask("GET", path, origin="http://evil.example")[0] == 403


def test_metrics_and_the_gateways_state_are_told_to_an_admin(api: Administered) -> None:
    for name in ("replicas", "queues", "routes"):
        assert api.ask("GET", f"/admin/v1/{name}") == (200, {name: []})
    status, text = api.ask("GET", "/metrics")
    assert status == 200
    assert b"penstock_gateway_requests_total" in text
