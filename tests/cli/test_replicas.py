"""Replicas of `serve --replicas N` as their keeper starts them: real processes that end before they load anything."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.replicas import (
    _keep,
    _reserved_ports,
    _start,
    _stop,
    _write_config,
    gateway_in_front,
    template_modules,
    with_transfer,
)
from penstock.cli.serve_fleet import _fleet
from penstock.core.errors import KeyNotFound
from penstock.core.settings import EngineSettings, ServerSettings, Settings
from penstock.engine.messages import EngineInfo, Ready
from penstock.engine_process.recurrent import for_recurrent
from penstock.engine_process.spawn import ForkedProcess, TemplateProcess
from tests.cli.real_server import write_tiny_model
from tests.model.family_configs import HYBRID, SHAPE


def never(info: EngineInfo) -> None:
    raise AssertionError("it cannot become ready")


def test_the_gateway_in_front_takes_bodies_as_large_as_the_replicas_behind_it_do() -> None:
    settings = Settings(server=ServerSettings(max_body_bytes=32 << 20))
    assert gateway_in_front(settings, "sqlite:///x", {}).max_body_bytes == 32 << 20


def test_a_range_of_replicas_of_an_onnx_model_is_known_to_take_tensors_before_one_is_there() -> None:
    pools = _fleet(Settings(model="x.onnx"), "f", 0, 2).pools
    assert [pool["tensors"] for pool in pools.values()] == [True]


def test_kv_blocks_go_between_replicas_of_models_whose_blocks_can(tmp_path: Path) -> None:
    """Of others they would be refused by the engine, and with them the replicas."""
    settings = Settings(engine=EngineSettings(load="dummy"))
    for shape, has_cache, port in ((SHAPE, True, 0), (SHAPE, False, None), (HYBRID, True, None)):
        own = replace(settings, engine=replace(settings.engine, prefix_cache=has_cache))
        files: Any = SimpleNamespace(config=shape)
        found = with_transfer(own, files)
        assert found.engine.kv_port == port
        for_recurrent(found.engine, shape)
        for role, of_role in (("both", port), ("prefill", 0)):
            written = json.loads(_write_config(found, "m", 1, role, 1, tmp_path).read_bytes())  # type: ignore[arg-type]
            assert written["engine"]["kv_port"] == of_role
        assert all(pool["engine"]["kv_port"] == port for pool in _fleet(found, "f", 1, 2).pools.values())


@pytest.mark.slow
def test_replica_that_cannot_be_started_is_not_started_again(tmp_path: Path) -> None:
    """Its own words end everything: a watermark that nobody has made cannot heal."""
    write_tiny_model(tmp_path)
    server = ServerSettings(watermark="nosuch", watermark_file=str(tmp_path / "watermarks.json"))
    settings = Settings(model=str(tmp_path), engine=EngineSettings(load="dummy"), server=server)
    config = _write_config(settings, "tiny", 0, "both", 2, tmp_path)
    with pytest.raises(KeyNotFound, match="there is no watermark 'nosuch'"):
        asyncio.run(_keep(config, never))


async def answer_of_new_replica(config: Path, port: int, *, is_forked: bool) -> tuple[EngineInfo, object]:
    """What a replica says of itself, and its answer with the probabilities of each token."""
    process, report = await _start(config)
    assert isinstance(process, ForkedProcess) == is_forked
    told = await report
    assert isinstance(told, Ready)
    try:
        body = {"model": "tiny", "prompt": "once upon", "max_tokens": 40, "temperature": 1.0, "seed": 5, "logprobs": 5}
        url, header = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), header)
        with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
            return told.info, json.load(answer)["choices"]
    finally:
        await _stop(process)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only")
def test_replica_forked_from_a_clean_template_answers_bit_for_bit_as_one_that_is_executed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    settings = Settings(model=str(tmp_path), engine=EngineSettings(load="dummy", dtype="float32"))
    with _reserved_ports(1) as (port,), TemplateProcess.start(template_modules(), tmp_path) as template:
        assert template is not None
        config = _write_config(settings, "tiny", port, "both", 1, tmp_path)
        forked, answer = asyncio.run(answer_of_new_replica(config, port, is_forked=True))
        threads, files = os.listdir(f"/proc/{template.pid}/task"), os.listdir(f"/proc/{template.pid}/fd")
        devices = [name for number in files if "nvidia" in (name := os.readlink(f"/proc/{template.pid}/fd/{number}"))]
        assert (len(threads), devices) == (1, [])  # no pool of OpenMP or BLAS, no CUDA
        with pytest.MonkeyPatch.context() as patched:  # ends before the template: what it restores is the template's
            patched.setenv("PENSTOCK_TEMPLATE", "off")
            executed, wanted = asyncio.run(answer_of_new_replica(config, port, is_forked=False))
    assert answer == wanted
    assert list(forked.startup_s) == list(executed.startup_s)
