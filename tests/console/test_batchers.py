"""Batchers of ONNX models in the console: at a replica, at a gateway, and on the page in Chromium."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock.console.at_replica import with_console
from penstock.console.feed import Feed
from penstock.core.slo import Slo
from penstock.gateway.settings.gateway import ModelSettings as PoolSettings
from penstock.tensors.replica import TensorReplica
from penstock.tensors.served_model import Inference
from tests.console.at_gateway import Console, console
from tests.console.browser import chromium, is_too_wide, opened
from tests.gateway.running import running_gateway
from tests.tensors.models import save_classifier
from tests.tensors.serving import Served, serving
from tests.waiting import eventually

NAME = "classifier"
SETTINGS = """
max_batch_size: 8
dynamic_batching:
  max_queue_delay_microseconds: 600000000
  default_queue_policy: {max_queue_size: 2}
instance_group: [{count: 2}]
version_policy: {all: {}}
"""
FIRST = [NAME, 1, 2, "cpu", 8, 0, 0, 8, 1, 0, 2, 600.0]  # all but the time in the queue


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a classifier, in Triton's layout."""
    path = tmp_path_factory.mktemp("repository") / NAME
    for version in ("1", "2"):
        save_classifier(path / version / "model.onnx")
    (path / "config.yaml").write_text(SETTINGS)
    return path


@contextlib.contextmanager
def consoled(model: Path) -> Iterator[tuple[Served, Console]]:
    """The console of a replica."""
    found: list[tuple[Feed, asyncio.AbstractEventLoop]] = []

    def mount(replica: TensorReplica) -> Any:
        app, feed = with_console(replica, replica.recorder, NAME, Slo(), is_loopback=True, period_s=0.05)
        found.append((feed, asyncio.get_running_loop()))
        return app

    with serving(model, mount=mount) as served:
        yield served, Console(served.ports.http, *found[0])
        found[0][1].call_soon_threadsafe(found[0][0].close)


def ask(served: Served, rows: int, version: str) -> None:
    tensor = tritonclient.http.InferInput("x", [rows, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((rows, 4), np.float32))
    with contextlib.closing(served.ports.http_client) as client:
        client.infer(NAME, [tensor], model_version=version)


@contextlib.contextmanager
def full_queue(served: Served, version: str) -> Iterator[None]:
    """Two requests wait for others, as many as may, and a third was refused."""
    batcher = served.replica.repository.find(NAME).find(version)
    asked = Inference({"x": np.ones((1, 4), np.float32)})
    waiting = [asyncio.run_coroutine_threadsafe(batcher.infer(asked), served.ports.loop) for _ in range(2)]
    eventually(lambda: batcher.num_waiting == 2)
    with pytest.raises(InferenceServerException, match="2 requests wait"):
        ask(served, 1, version)
    yield
    for one in waiting:
        one.cancel()


def test_a_replica_shows_versions_with_their_batchers_and_its_requests(model: Path) -> None:
    with consoled(model) as (served, page):
        assert b"<title>penstock" in page.get("/")[2]
        ask(served, 8, "1")
        with full_queue(served, "2"), page.events() as events:
            _, hello = next(events)
            state, requests = hello["state"], hello["requests"]
            while len(requests) < 2:
                _, tick = next(events)
                state, requests = tick["state"], requests + tick["requests"]
    (replica,) = state["replicas"]
    first, second = replica["tensors"]
    assert first[:-1] == FIRST
    assert first[-1] > 0
    assert second == [NAME, 2, 2, "cpu", 8, 2, 0, 0, 0, 1, 2, 600.0, None]
    assert [one["name"] for one in state["models"]] == [NAME]
    assert sorted((one["ending"], one["model"]) for one in requests) == [("ok", NAME), ("refused", NAME)]


def test_a_gateway_shows_the_batchers_of_its_replicas(model: Path) -> None:
    with (
        serving(model) as served,
        running_gateway(pools={NAME: PoolSettings([served.url])}) as gateway,
        console(gateway) as page,
    ):
        ask(served, 8, "1")

        def shown() -> Any:
            gateway.call(lambda: page.feed.tick(1.0))
            with page.events() as events:
                (replica,) = next(events)[1]["state"]["replicas"]
            return replica["tensors"] and replica["tensors"][0][:-1]

        assert eventually(shown, lambda found: found == FIRST)


@pytest.mark.slow
def test_the_page_shows_batchers(model: Path, tmp_path: Path) -> None:
    with chromium() as browser, consoled(model) as (served, site):
        ask(served, 8, "1")
        with full_queue(served, "2"), opened(browser, f"http://127.0.0.1:{site.port}/#/replicas") as page:
            rows = page.get_by_role("table", name="Batchers").locator("tbody tr")
            rows.nth(1).wait_for()
            first, second = ([one.strip() for one in rows.nth(at).locator("td").all_inner_texts()] for at in range(2))
            assert first[0].startswith("classifier version 1")
            assert first[1:4] == ["2 cpu", "0", "0 / 2"]
            assert first[5:] == ["10 min", "1", "8 / 8", "0"]
            assert second[0].startswith("classifier version 2")
            assert second[1:] == ["2 cpu", "0", "2 / 2", "–", "10 min", "0", "– / 8", "1"]
            assert not is_too_wide(page)
            page.screenshot(path=str(tmp_path / "batchers.png"))
            page.set_viewport_size({"width": 390, "height": 800})
            assert not is_too_wide(page)
