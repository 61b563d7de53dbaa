"""`penstock bench engine` on the smallest shape, with little more installed than a GPU's machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main

# What the edge, the server and the readers of other formats need, and a bench of one device does not.
ABSENT = (
    "aiohttp",
    "gguf",
    "httptools",
    "jinja2",
    "prometheus_client",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
    "yaml",
)
WITHOUT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from penstock.cli.main import main
main()
"""


@pytest.mark.slow
def test_it_runs_where_little_is_installed_and_writes_all_that_a_table_needs(tmp_path: Path) -> None:
    words = "--shape tiny --load dummy --workload W1,W1b --rounds 2 --device cpu --dtype float32 --max-num-seqs 4"
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", WITHOUT, "bench", "engine", *words.split(), "--json", str(report)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "ready in" in ended.stdout
    found = json.loads(report.read_text())
    assert (found["shape"], found["number_format"], found["quant"], found["kv_dtype"]) == (
        "tiny",
        "float32",
        "none",
        "float32",
    )
    assert list(found["startup_s"]) == ["import", "kernels", "weights", "cache"]
    assert found["max_num_seqs"] == 4
    assert {"penstock", "torch"} <= found["versions"].keys()
    assert [figure["workload"] for figure in found["figures"]] == ["W1", "W1b"]
    for figure in found["figures"]:
        assert len(figure["rounds"]) == 2
        assert figure["seconds"] == min(each["seconds"] for each in figure["rounds"])
        assert figure["steps"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--quant", "fp8"], "quant is fp8"),
        (["--device", "cpu", "--kv-dtype", "fp8"], "kv_dtype is fp8"),
        (["--memory-fraction", "1.5"], "engine.memory_fraction"),
        (["--workload", "W9"], "W9"),
    ],
)
def test_what_cannot_be_is_told(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["bench", "engine", "--shape", "tiny", *words])


@pytest.mark.slow
def test_it_parks_and_wakes_an_engine_and_compares_its_tokens(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = "bench engine --shape tiny --device cpu --dtype float32 --max-num-seqs 8 --park 2 --json"
    main([*words.split(), str(report)])
    found = json.loads(report.read_text())
    assert found["figures"] == []
    assert [one["is_equal"] for one in found["parks"]] == [True, True]
    assert all(one["given_back_bytes"] > 0 for one in found["parks"])
