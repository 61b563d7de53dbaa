"""`penstock replicas park` and `wake`, which ask the replica itself."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import main
from penstock.core.settings import ServerSettings
from tests.dialects.servers import FakeVllm
from tests.server.replica import serving


def test_a_replica_is_parked_and_woken_by_its_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(ServerSettings(gateway_secret="open sesame")) as replica:
        url = f"http://{replica.host}:{replica.port}"
        with pytest.raises(SystemExit, match="gateway"):
            main(["replicas", "park", url, "--dialect", "penstock"])
        monkeypatch.setenv("SESAME", "open sesame")
        main(["replicas", "park", url, "--secret-env", "SESAME", "--wait-s", "5"])
        assert f"{url}: parked after" in capsys.readouterr().out
        assert replica.engine.state == "parked"
        main(["replicas", "wake", url, "--secret-env", "SESAME", "--json"])
        assert json.loads(capsys.readouterr().out)["state"] == "ready"
        assert replica.engine.state == "ready"


def test_another_engine_is_parked_by_its_own_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeVllm() as fake:
        main(["replicas", "park", fake.url])
        assert fake.is_parked
        main(["replicas", "wake", fake.url, "--dialect", "vllm"])
        assert not fake.is_parked
        assert "ready after" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="klingon"):
            main(["replicas", "park", fake.url, "--dialect", "klingon"])
    with pytest.raises(SystemExit, match="cannot be reached"):
        main(["replicas", "park", fake.url])
