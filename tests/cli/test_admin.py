"""Real gateways administered over HTTP: keys that work and end everywhere at once, ports, prices, and the logs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.tenancy.store import open_store
from tests.cli.real_gateway import RealGateway, real_gateway
from tests.server.replica import Replica, serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "a secret wish"}],
    "max_tokens": 5,
    "ignore_eos": True,
}
PRICE = {"input": 1000.0, "output": 2000.0, "cached": 100.0}


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving() as found:
        yield found


@pytest.fixture
def admin_key(tmp_path: Path) -> str:
    with open_store(f"sqlite:///{tmp_path / 'tenants.db'}") as store:
        return store.admins.add("root").secret


def chat(gateway: RealGateway, key: str) -> int:
    return gateway.ask("POST", "/v1/chat/completions", CHAT, key=key)[0]


def test_a_key_made_and_revoked_at_one_gateway_works_and_ends_at_another(
    tmp_path: Path, replica: Replica, admin_key: str
) -> None:
    with real_gateway(tmp_path, replica) as one, real_gateway(tmp_path, replica) as two:
        assert one.ask("POST", "/admin/v1/tenants", {"id": "acme"}, key=admin_key)[0] == 201
        _, made = one.ask("POST", "/admin/v1/tenants/acme/keys", {"name": "laptop"}, key=admin_key)
        key = made["key"]
        eventually(lambda: two.knows(key))
        assert [chat(two, one) for one in (key, admin_key)] == [200, 401]
        assert two.ask("GET", "/admin/v1/tenants", key=key)[0] == 403
        assert two.ask("GET", "/metrics", key=key)[0] == 403
        assert one.ask("DELETE", f"/admin/v1/keys/{made['id']}", key=admin_key)[0] == 200
        for gateway in (two, one):
            eventually(lambda gateway=gateway: chat(gateway, key), lambda status: status == 401)  # type: ignore[misc]
        one.command("admins", "revoke", "root")
        eventually(lambda: two.ask("GET", "/admin/v1/tenants", key=admin_key)[0], lambda status: status == 401)


def test_only_an_admin_may_send_a_body_to_the_admin_api(tmp_path: Path, replica: Replica, admin_key: str) -> None:
    with real_gateway(tmp_path, replica) as gateway:
        large = b" " * 3_000_000 + b'{"id": "acme"}'
        assert gateway.ask("POST", "/admin/v1/tenants", large, key="psa_none")[0] == 401
        assert gateway.ask("POST", "/nowhere", large, key=admin_key)[0] == 404
        assert gateway.ask("POST", "/admin/v1/tenants", large, key=admin_key)[0] == 413  # read, and too large for it


@pytest.mark.drill
def test_a_key_works_and_ends_at_another_gateway_within_a_second(
    tmp_path: Path, replica: Replica, admin_key: str
) -> None:
    with real_gateway(tmp_path, replica) as one, real_gateway(tmp_path, replica) as two:
        one.ask("POST", "/admin/v1/tenants", {"id": "acme"}, key=admin_key)
        made = one.ask("POST", "/admin/v1/tenants/acme/keys", {"name": "laptop"}, key=admin_key)[1]
        made_s = time.monotonic()
        eventually(lambda: two.knows(made["key"]))
        assert time.monotonic() - made_s < 1.0
        one.ask("DELETE", f"/admin/v1/keys/{made['id']}", key=admin_key)
        revoked_s = time.monotonic()
        eventually(lambda: chat(two, made["key"]), lambda status: status == 401)
        took_s = time.monotonic() - revoked_s
        print(f"a revocation through the API took effect at another gateway after {took_s * 1e3:.0f} ms")
        assert took_s < 1.0


def test_with_nobody_configured_it_is_open_and_says_so_until_somebody_is(tmp_path: Path, replica: Replica) -> None:
    with real_gateway(tmp_path, replica) as gateway:
        assert gateway.notice.endswith("open to everybody here: there are no tenants and no admins yet")
        assert chat(gateway, "none") == 200
        (seen,) = gateway.ask("GET", "/admin/v1/replicas")[1]["replicas"]
        assert (seen["state"], seen["breaker"], seen["in_flight"]) == ("ready", "closed", 0)
        assert gateway.ask("GET", "/admin/v1/routes")[1]["routes"][0]["name"] == "small"
        assert gateway.ask("GET", "/metrics")[0] == 200
        for page in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            assert gateway.ask("POST", "/admin/v1/tenants", {"id": "acme"}, **page)[0] == 403
        assert gateway.ask("POST", "/admin/v1/tenants", {"id": "acme"})[0] == 201
        eventually(lambda: gateway.ask("GET", "/admin/v1/tenants")[0], lambda status: status == 401)


def test_beyond_loopback_admin_and_metrics_are_on_the_admin_port_only(
    tmp_path: Path, replica: Replica, admin_key: str
) -> None:
    everywhere: dict[str, Any] = {"host": "0.0.0.0", "allow_anonymous": True}
    with real_gateway(tmp_path, replica, admin_port=0, **everywhere) as gateway:
        for path in ("/admin/v1/tenants", "/metrics"):
            assert gateway.ask("GET", path, key=admin_key)[0] == 404
            assert gateway.ask("GET", path, key=admin_key, url=gateway.admin_url)[0] == 200
        assert gateway.ask("GET", "/metrics", url=gateway.admin_url)[0] == 200
        assert gateway.ask("GET", "/admin/v1/tenants", url=gateway.admin_url)[0] == 401
        # The console's playground is there, so the models are too, by the door's own rules.
        assert gateway.ask("POST", "/v1/chat/completions", CHAT, url=gateway.admin_url)[0] == 200
    with real_gateway(tmp_path, replica, **everywhere) as gateway:
        assert "not served" in gateway.notice
        for path in ("/admin/v1/tenants", "/metrics"):
            assert gateway.ask("GET", path, key=admin_key)[0] == 404


def test_what_is_used_costs_what_the_prices_say_and_a_budget_of_money_ends(
    tmp_path: Path, replica: Replica, admin_key: str
) -> None:
    with real_gateway(tmp_path, replica, price=PRICE) as gateway:
        gateway.ask("POST", "/admin/v1/tenants", {"id": "acme", "budget": {"money_per_day": 0.05}}, key=admin_key)
        key = gateway.ask("POST", "/admin/v1/tenants/acme/keys", key=admin_key)[1]["key"]
        eventually(lambda: gateway.knows(key))
        spent = 0.0
        while spent < 0.05:
            status, answer = gateway.ask("POST", "/v1/chat/completions", CHAT, key=key)
            assert status == 200
            used = answer["usage"]
            cached = used["prompt_tokens_details"]["cached_tokens"]
            spent += (used["prompt_tokens"] - cached) / 1e3 + cached / 1e4 + used["completion_tokens"] * 2 / 1e3
        status, answer = gateway.ask("POST", "/v1/chat/completions", CHAT, key=key)
        assert (status, answer["error"]["code"]) == (429, "budget_exhausted")

        def cost() -> float:
            _, told = gateway.ask("GET", "/admin/v1/tenants/acme/usage?by=all", key=admin_key)
            return float(told["total"]["cost"])

        eventually(cost, lambda found: found == pytest.approx(spent))
        assert re.search(rf"^total .* {spent:.4f}$", gateway.command("usage", "acme"), re.MULTILINE)


def test_the_log_has_a_line_per_request_and_never_a_key_or_a_prompt(
    tmp_path: Path, replica: Replica, admin_key: str
) -> None:
    with real_gateway(tmp_path, replica) as gateway:
        gateway.ask("POST", "/admin/v1/tenants", {"id": "acme"}, key=admin_key)
        made = gateway.ask("POST", "/admin/v1/tenants/acme/keys", key=admin_key)[1]
        key = made["key"]
        eventually(lambda: gateway.knows(key))
        assert chat(gateway, key) == 200
        # Whatever goes wrong, with keys where they should be and where they should not.
        for method, path, body in (
            ("POST", "/v1/chat/completions", b"{"),
            ("POST", "/v1/chat/completions", {**CHAT, "model": key}),
            ("POST", f"/v1/chat/completions?key={key}", CHAT),
            ("GET", f"/{key}", None),
            ("POST", f"/admin/v1/tenants/{key}/keys", {"name": key}),
            ("DELETE", f"/admin/v1/keys/{key}x", None),
            ("POST", f"/admin/v1/keys/{key}/rotate", {"grace_s": key}),
        ):
            for credential in (key, admin_key, f"{key}x", f"{admin_key}x"):
                gateway.ask(method, path, body, key=credential)
                gateway.ask(method, path, body, **{"x-api-key": credential})
        eventually(gateway.log.read_text, lambda log: "outcome=ok" in log)
    log = gateway.log.read_text()
    for secret in (key, admin_key):
        assert secret.rpartition("_")[2] not in log
    assert "secret wish" not in log
    assert re.search(
        rf"^\S+Z id=[0-9a-f]{{24}} tenant=acme key={made['id']} surface=chat/completions model=small "
        r"replica=http://\S+ outcome=ok reason=- prompt=\d+ cached=\d+ output=5 queue_ms=\d+\.\d ttft_ms=- "
        r"total_ms=\d+\.\d tries=1 device_ms=\d+\.\d kv_block_s=\d+\.\d{3}$",
        log,
        re.MULTILINE,
    )
    assert "outcome=refused reason=model_not_found" in log
    assert "penstock.gateway.admin: admin=root POST /admin/v1/tenants: done" in log


def test_the_request_log_can_be_switched_off(tmp_path: Path, replica: Replica) -> None:
    with real_gateway(tmp_path, replica, level="info", request_log=False) as gateway:
        assert chat(gateway, "none") == 200
    assert "outcome=" not in gateway.log.read_text()  # it has ended, and lines that it held would be written
