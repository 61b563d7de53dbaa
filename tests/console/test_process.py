"""`penstock gateway` as an operator starts it: where its console is, and that who looks at it does not keep it up."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.cli.real_gateway import real_gateway
from tests.server.replica import serving
from tests.waiting import GIVE_UP_S

pytestmark = pytest.mark.slow


def test_the_console_is_at_the_root_beside_the_models(tmp_path: Path) -> None:
    with serving() as replica, real_gateway(tmp_path, replica) as gateway:
        assert "the console is at /" in gateway.notice
        assert b"<title>penstock" in gateway.ask("GET", "/")[1]
        assert gateway.ask("GET", "/v1/models")[1]["data"][0]["id"] == "small"
        viewer = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=GIVE_UP_S)
        viewer.request("GET", "/console/v1/feed")
        stream = viewer.getresponse()
        assert stream.readline() == b"event: hello\n"
        gateway.process.terminate()
        assert stream.read().endswith(b"\n\n")  # it ends in good order, and so does the gateway
        viewer.close()
        assert gateway.process.wait(GIVE_UP_S) == 0


def test_on_a_port_of_its_own_it_has_the_models_for_its_playground(tmp_path: Path) -> None:
    with serving() as replica, real_gateway(tmp_path, replica, admin_port=0) as gateway:
        own = gateway.admin_url
        assert gateway.ask("GET", "/")[0] == 404
        assert b"<title>penstock" in gateway.ask("GET", "/", url=own)[1]
        assert gateway.ask("GET", "/v1/models", url=own)[1]["data"][0]["id"] == "small"
        assert gateway.ask("GET", "/admin/v1/replicas", url=own)[0] == 200
