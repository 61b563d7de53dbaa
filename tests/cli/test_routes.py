"""Versions and rules as an operator has them: two gateways with one store, changed by the admin API and by command."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.gateway.provider import Provider, providing
from tests.waiting import eventually

pytestmark = pytest.mark.slow

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
Two = tuple[RealGateway, RealGateway]


@pytest.fixture(scope="module")
def versions() -> Iterator[tuple[Provider, Provider]]:
    with providing(says="one", delay_s=0.01) as one, providing(says="two", delay_s=0.01) as two:
        yield one, two


def settings(versions: tuple[Provider, Provider], **more: Any) -> dict[str, Any]:
    one, two = versions
    model = {"versions": {"v1": {"replicas": [one.url], "weight": 100}, "v2": {"replicas": [two.url], **more}}}
    return {"models": {"m": model}, "request_log": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the store of the two gateways is."""
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module")
def gateways(directory: Path, versions: tuple[Provider, Provider]) -> Iterator[Two]:
    common = settings(versions)
    with real_gateway(directory, **common) as first, real_gateway(directory, **common) as second:
        yield first, second


def said(gateway: RealGateway, **more: object) -> str:
    status, answer = gateway.ask("POST", "/v1/chat/completions", BODY | more)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def weights(gateway: RealGateway) -> dict[str, float]:
    return dict(gateway.ask("GET", "/admin/v1/routes/m")[1]["pools"])


class Load:
    """Clients that ask without a pause, by turns for an answer and for a stream."""

    def __init__(self, gateways: Two, num_clients: int = 8) -> None:
        self.outcomes: Counter[str] = Counter()
        self.streams: Counter[tuple[str, str]] = Counter()  # by the gateway's URL and the outcome
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(gateways[n % 2],)) for n in range(num_clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, gateway: RealGateway) -> None:
        connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=60)
        stream = False
        while not self._is_over.is_set():
            stream = not stream
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(BODY | {"stream": stream}))
                answer = connection.getresponse()
                content = answer.read().decode()
                whole = "[DONE]" in content if stream else "usage" in content
                who = "one" if '"one"' in content else "two" if '"two"' in content else "nobody"
                self._count(
                    gateway, who if answer.status == 200 and whole else f"{answer.status} {content[:200]}", stream
                )
            except (OSError, http.client.HTTPException) as error:
                self._count(gateway, repr(error), stream)
        connection.close()

    def _count(self, gateway: RealGateway, outcome: str, stream: bool) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            self.streams[gateway.url, outcome] += stream


def test_a_change_and_its_rollback_are_everywhere_and_lose_nothing(gateways: Two) -> None:
    first, second = gateways
    with Load(gateways) as load:
        eventually(lambda: load.outcomes["one"], lambda count: count > 20)
        assert load.outcomes["two"] == 0
        for change, path, asked, expected in (
            ("PATCH", "", {"weights": {"v1": 50, "v2": 50}}, {"m@v1": 50.0, "m@v2": 50.0}),
            ("POST", "/promote", {"version": "v2"}, {"m@v1": 0.0, "m@v2": 100.0}),
            ("POST", "/rollback", {}, {"m@v1": 50.0, "m@v2": 50.0}),
            ("POST", "/rollback", {}, {"m@v1": 100.0, "m@v2": 0.0}),
        ):
            status, answer = first.ask(change, f"/admin/v1/routes/m{path}", asked)
            assert status == 200, answer
            are_everywhere(gateways, expected)
            before = Counter(load.outcomes)
            eventually(lambda before=before: (load.outcomes - before).total(), lambda count: count > 30)  # type: ignore[misc]
            if expected["m@v2"] == 100.0:
                assert {said(one) for one in gateways for _ in range(5)} == {"two"}
                eventually(lambda: load.streams[first.url, "two"])
            elif expected["m@v2"] == 0.0:
                assert {said(one) for one in gateways for _ in range(5)} == {"one"}
            else:
                eventually(lambda before=before: load.outcomes - before, lambda more: more["one"] and more["two"])  # type: ignore[misc]
    assert set(load.outcomes) <= {"one", "two"}
    actions = [one["action"] for one in second.ask("GET", "/admin/v1/routes/m/history")[1]["revisions"]]
    assert actions == ["rollback to the file", "rollback to 1", "promote v2", "weights"]

    def compared() -> list[dict[str, Any]]:
        return [one.ask("GET", "/admin/v1/routes/m/compare?since=1h")[1]["versions"] for one in gateways]

    def answered(found: list[dict[str, Any]]) -> int:
        return sum(one[version]["requests"] for one in found for version in ("v1", "v2"))

    found, _ = eventually(compared, lambda found: answered(found) == load.outcomes.total() + 20)
    assert found["v1"]["errors"] == found["v2"]["errors"] == 0
    assert found["v2"]["ttft_s"]["p95"] > 0


def are_everywhere(gateways: Two, expected: dict[str, float]) -> None:
    eventually(lambda: [weights(one) for one in gateways], lambda found: found == [expected] * len(gateways))


@pytest.mark.drill
def test_a_change_is_everywhere_within_a_second(gateways: Two) -> None:
    first, _ = gateways
    for version, expected in (("v2", {"m@v1": 0.0, "m@v2": 100.0}), ("v1", {"m@v1": 100.0, "m@v2": 0.0})):
        assert first.ask("POST", "/admin/v1/routes/m/promote", {"version": version})[0] == 200
        began_s = time.monotonic()
        are_everywhere(gateways, expected)
        assert time.monotonic() - began_s < 1.0


def test_a_gateway_that_starts_late_has_what_was_changed(
    gateways: Two, directory: Path, versions: tuple[Provider, Provider]
) -> None:
    assert "v1=0 v2=100" in gateways[0].command("routes", "promote", "m", "v2")
    are_everywhere(gateways, {"m@v1": 0.0, "m@v2": 100.0})
    with real_gateway(directory, **settings(versions)) as late:
        assert [said(late) for _ in range(5)] == ["two"] * 5
        assert late.command("routes", "rollback", "m").startswith("m: v1=100 v2=0")
        assert "v1=90 v2=10, shadow v2=0.5" in late.command(
            "routes", "weights", "m", "v1=90", "v2=10", "--shadow", "v2=0.5"
        )
        listed, shown = late.command("routes", "list"), late.command("routes", "show", "m")
        assert "v1=90 v2=10" in listed
        assert "rollback to the file" in shown
        assert "promote v2" in shown
        assert json.loads(late.command("routes", "show", "m", "--json"))["weights"] == {"v1": 90.0, "v2": 10.0}


def test_what_cannot_be_changed_is_said(tmp_path: Path, versions: tuple[Provider, Provider]) -> None:
    with real_gateway(tmp_path, **settings(versions)) as gateway:
        for method, path, body, status, word in (
            ("PATCH", "m", {"weights": {"v3": 1}}, 422, "no version 'v3'"),
            ("PATCH", "m", {"weights": {"v1": -1}}, 422, ">= 0"),
            ("PATCH", "m", {"weights": {"v1": 0}}, 422, "would have a weight"),
            ("PATCH", "m", {"wieghts": {}}, 422, "wieghts"),
            ("PATCH", "n", {"weights": {"v1": 1}}, 404, "no model 'n'"),
            ("POST", "m/promote", {}, 422, "version"),
            ("POST", "m/rollback", {}, 409, "nothing before"),
            ("GET", "m/rules", None, 409, "no rules"),
            ("DELETE", "m", None, 405, "PATCH"),
        ):
            found, answer = gateway.ask(method, f"/admin/v1/routes/{path}", body)
            assert (found, word in answer["error"]["message"]) == (status, True), answer


def test_a_shadow_neither_slows_nor_costs_anything(tmp_path: Path) -> None:
    with (
        providing(says="one") as one,
        providing(says="two", dawdles=True) as two,
        real_gateway(tmp_path, **settings((one, two), shadow=1.0)) as gateway,
    ):
        gateway.command("tenants", "add", "acme", "--tokens-per-minute", "1000000")
        key = gateway.command("keys", "create", "acme")
        admin = gateway.command("admins", "add", "root")
        eventually(lambda: gateway.knows(key))

        num_asked = 0

        def ask() -> int:
            nonlocal num_asked
            assert gateway.ask("POST", "/v1/chat/completions", BODY, key=key)[0] == 200
            num_asked += 1
            return len(two.asked)

        # A copy is dropped while its replica is not there yet, or has not answered the gateway's last probe in time.
        eventually(ask, lambda count: count >= 20)
        two.may_answer.set()  # all were answered while the shadow said nothing

        def compared() -> dict[str, Any]:
            return dict(gateway.ask("GET", "/admin/v1/routes/m/compare", key=admin)[1]["versions"])

        def outcomes() -> dict[str, int]:
            found = dict(compared()["v2"].get("shadow", {}).get("outcomes", {}))
            found.pop("dropped", None)
            return found

        eventually(outcomes, lambda found: found == {"ok": len(two.asked)})
        assert (compared()["v1"]["requests"], compared()["v2"]["requests"]) == (num_asked, 0)

        def usage() -> dict[str, Any]:
            return dict(json.loads(gateway.command("usage", "acme", "--json")))

        used = eventually(usage, lambda found: found["total"]["requests"] == num_asked)
        assert {row["model"] for row in used["usage"]} == {"m@v1"}


def test_rules_are_in_the_header_the_log_and_the_admin_api(tmp_path: Path, versions: tuple[Provider, Provider]) -> None:
    small, big = versions
    models = {
        "small": {"replicas": [small.url], "price": {"input": 1, "output": 1}},
        "big": {"replicas": [big.url], "price": {"input": 10, "output": 10}},
        "auto": {"rules": [{"name": "tasks", "tasks": ["title"], "to": "small"}], "default": "big", "dry_run": True},
    }
    with real_gateway(tmp_path, models=models) as gateway:
        headers = {"x-penstock-task": "title"}
        status, _ = gateway.ask("POST", "/v1/chat/completions", BODY | {"model": "auto"}, **headers)
        assert status == 200
        eventually(gateway.log.read_text, lambda log: " rule=default->big;would=tasks->small" in log)
        document = gateway.ask("GET", "/admin/v1/routes/auto/rules")[1]
        assert document["rules"][0] == {
            "rule": "tasks",
            "to": "small",
            "requests": 1,
            "input_tokens": 3,
            "output_tokens": 1,
            "saved": pytest.approx(36e-6),
        }
        (auto,) = [one for one in gateway.ask("GET", "/admin/v1/routes")[1]["routes"] if one["name"] == "auto"]
        assert auto["rules"] == ["tasks->small", "default->big"]


def test_replicas_of_a_version_that_no_file_names_make_it_one_that_can_be_promoted(
    versions: tuple[Provider, Provider], tmp_path: Path
) -> None:
    one, two = versions
    models = {"m": {"replicas": [one.url], "aliases": ["short"]}}
    with real_gateway(tmp_path, models=models, request_log=False) as gateway:
        gateway.command("replicas", "add", "m@v2", two.url)
        shown = eventually(lambda: json.loads(gateway.command("routes", "list", "--json")))
        assert [(route["name"], route["weights"]) for route in shown] == [("m", {"base": 100.0, "v2": 0.0})]
        eventually(lambda: gateway.ask("POST", "/v1/chat/completions", BODY | {"model": "m@v2"})[0], lambda s: s == 200)
        assert [said(gateway, model=name) for name in ("m", "short", "m@base", "m@v2")] == ["one", "one", "one", "two"]
        gateway.command("routes", "promote", "m", "v2")
        eventually(lambda: said(gateway), lambda found: found == "two")
        gateway.command("routes", "rollback", "m")
        eventually(lambda: said(gateway), lambda found: found == "one")
