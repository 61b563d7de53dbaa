"""A gateway of our own for the side-by-side: as in production, with a tenant, a key and limits that nobody reaches."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.bench.gateway import Candidate
from penstock.tenancy.store import open_store

MODEL = "fake-model"  # what the fake upstream calls itself
_PLENTY = {"requests_per_minute": 10**8, "tokens_per_minute": 10**12, "concurrency": 10**6}


def own_gateway(directory: Path) -> Candidate:
    store = f"sqlite:///{directory / 'penstock.db'}"
    with open_store(store) as opened:
        opened.add_tenant({"id": "bench", "limits": _PLENTY})
        key = opened.create_key("bench").secret
    command = [sys.executable, "-m", "penstock.bench.own_gateway", str(directory), store]
    return Candidate("penstock", f"{shlex.join(command)} {{port}} {{ports}}", key)


def main(arguments: Sequence[str]) -> None:
    """Becomes `penstock gateway` in front of these upstreams."""
    directory, store, port, *ports = arguments
    config = {
        "port": int(port),
        "store": store,
        "models": {MODEL: {"replicas": [f"http://127.0.0.1:{one}" for one in ports], "dialect": "openai"}},
    }
    path = Path(directory) / f"{port}.yaml"  # JSON is YAML
    path.write_bytes(msgspec.json.encode(config))
    os.environ["PENSTOCK_HOME"] = directory
    command = [sys.executable, "-m", "penstock.cli.main", "gateway", "--config", str(path), "--log-level", "warning"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
