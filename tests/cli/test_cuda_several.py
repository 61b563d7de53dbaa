"""Two models of one server that need all of a GPU's share take turns on it, and answer as they did before."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.cli.several_models import Several
from tests.cli.tiny_model import write_tiny_model
from tests.gpu import NEEDS_GPU
from tests.waiting import eventually

pytestmark = NEEDS_GPU

MEMORY_GIB = 3.5  # two of these models need 2 GiB each and a little, of which a parked one keeps 1
_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    pytest.importorskip("uvloop")
    directory = tmp_path_factory.mktemp("several")
    write_tiny_model(directory, **_SHAPE, max_position_embeddings=4096)
    models = {name: {"model": str(directory)} for name in ("alpha", "beta")}
    file = directory / "models.yaml"
    file.write_text(yaml.safe_dump({"memory_gib": MEMORY_GIB, "min_residence_s": 1.0, "models": models}))
    flags = ["--load", "dummy", "--dtype", "bfloat16", "--chunk-tokens", "512", "--max-num-seqs", "16"]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--models", str(file), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        banner = ""
        while "curl" not in banner:
            line = process.stdout.readline()
            assert line, f"the server ended before it was ready:\n{banner}"
            banner += line
        assert ("by MPS" in banner) == (shutil.which("nvidia-cuda-mps-control") is not None)
        found = re.search(r"http://[^\s/,]+", banner)
        assert found is not None
        yield Several(found.group())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def answer(several: Several, model: str) -> str:
    status, found = several.chat(model, temperature=0, max_tokens=20)
    assert status == 200, found
    return str(found["choices"][0]["message"]["content"])


def test_models_take_turns_on_one_gpu_and_answer_as_before(several: Several) -> None:
    found = several.ask("GET", "/v1/penstock/models")[1]
    (device,) = found["devices"]
    assert device["name"] != "cpu"
    assert [one["state"] for one in found["models"]] == ["loaded", "unloaded"]
    first = {name: answer(several, name) for name in ("alpha", "beta")}
    assert several.state("alpha") in ("parked", "unloaded"), "both were there at a time"
    assert first["alpha"] == first["beta"], "they are the same model"
    for name in ("alpha", "beta", "alpha"):
        assert answer(several, name) == first[name]
    held = several.ask("GET", "/v1/penstock/models")[1]["devices"][0]["held_bytes"]
    assert held <= MEMORY_GIB * (1 << 30)


def test_a_model_that_does_not_fit_beside_a_pinned_one_is_refused_in_figures(several: Several) -> None:
    assert several.order("alpha", "pin")[0] in (200, 202)
    eventually(lambda: several.state("alpha"), lambda state: state == "loaded")
    status, found = several.order("beta", "load")
    assert (status, found["error"]["reason"]) == (409, "no_room")
    assert "too little" in found["error"]["message"]
    assert several.order("alpha", "unpin")[0] == 200
    assert eventually(lambda: several.chat("beta")[0], lambda status: status == 200)
