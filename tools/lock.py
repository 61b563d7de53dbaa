"""Write requirements.lock and requirements-dev.lock from pyproject.toml: `python tools/lock.py`.

Versions are what pip resolves today; local parts (`+cpu`) are dropped, so that each machine takes its own build.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"  # a plain `torch` drags in another build


def resolve(requirements: list[str]) -> dict[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        arguments = ["--dry-run", "--ignore-installed", "--quiet", "--report", report.name, *requirements]
        subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)
        found = json.loads(Path(report.name).read_text())["install"]
    names = (entry["metadata"] for entry in found)
    return {m["name"].lower().replace("_", "-"): m["version"].partition("+")[0] for m in names}


def write(path: Path, head: str, pins: dict[str, str], markers: dict[str, str]) -> None:
    lines = (f"{name}=={version}{markers.get(name, '')}\n" for name, version in sorted(pins.items()))
    path.write_text(head + "".join(lines))


def markers_of(requirements: list[str]) -> dict[str, str]:
    """What comes behind a requirement of our own that only some systems have. Those of others' are not kept."""
    split = (one.partition(";") for one in requirements)
    return {re.split(r"[=<>\[ ]", name)[0].lower(): f"; {marker.strip()}" for name, _, marker in split if marker}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    engine = [TORCH if one.startswith("torch") else one for one in extras["engine"]]
    runtime = [*project["project"]["dependencies"], *engine]
    dev = project["dependency-groups"]["dev"]
    everything = resolve([*runtime, *dev])
    pinned = {name: everything[name] for name in resolve(runtime)}
    rest = {name: version for name, version in everything.items() if name not in pinned}
    write(ROOT / "requirements.lock", "# The versions penstock is tested with. Written by tools/lock.py.\n", pinned, {})
    write(
        ROOT / "requirements-dev.lock",
        "# What tests and checks need besides.\n-r requirements.lock\n",
        rest,
        markers_of(dev),
    )


if __name__ == "__main__":
    main()
