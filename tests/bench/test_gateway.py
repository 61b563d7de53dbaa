from pathlib import Path

import pytest

from penstock.bench.gateway import DIRECT, LOADS, Candidate, Run, compile_tools, markdown
from penstock.core.errors import ConfigError


def run(candidate: str, load: str, cpu_s: float, p50: float) -> Run:
    latency = {"p50": p50, "p99": 3 * p50}
    told = {"req_all": 1000, "rps": 900.0, "chunks_all": 0, "chunks_s": 0.0, "err": 0, "short": 0, "unfinished": 0}
    return Run(candidate, load, cpu_s, 50 << 20, {**told, "lat": latency})


def test_first_gateway_is_compared_by_cpu_and_its_latency_is_what_it_adds():
    candidates = [Candidate("ours", ""), Candidate("peer", "")]
    loads = [load for load in LOADS if load.name in ("whole", "rate100")]
    runs = [run("ours", "whole", cpu_s, 100.0) for cpu_s in (0.1, 0.05, 0.4)]
    runs += [run("peer", "whole", 0.2, 100.0), run("ours", "rate100", 0.1, 250.0), run("peer", "rate100", 0.1, 500.0)]
    runs += [run(DIRECT, "rate100", 0.0, 50.0)]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown(runs, candidates, loads).splitlines()]
    assert rows[2] == ["whole", "ours", "900", "10,000", "100 / 300", "0", "50", "2.00"]
    assert rows[3] == ["whole", "peer", "900", "5,000", "100 / 300", "0", "50", ""]
    assert rows[4][4] == "added: 200 / 600"


def test_unknown_load_generator_is_refused(tmp_path: Path):
    (tmp_path / "lgen.c").write_text("int main(void) { return 0; }")
    with pytest.raises(ConfigError, match="not the one that is known"):
        compile_tools(tmp_path, tmp_path)
