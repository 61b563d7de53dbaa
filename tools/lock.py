"""Write the locks from pyproject.toml: `python tools/lock.py`.

Versions are what pip resolves today. Each has the hashes of all its files on PyPI, so that every platform and Python
finds its own among them and `pip install --require-hashes` takes nothing else. torch is in a lock of its own, without:
which build a machine takes (`+cpu`, CUDA), from which index and with which libraries is for that machine to say, and
pip would refuse those libraries for want of a hash.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parent.parent
IMAGE = (
    "postgres",
    "redis",
    "zmq",
    "dns",
    "otel",
    "kubernetes",
    "epp",
    "grpc",
    "gpu",
)  # of every image
TORCH = "torch==2.13.0"  # a plain `torch` drags in another build
INDEX = "https://pypi.org/simple"
HASH = " \\\n    --hash=sha256:{}"
_FILE = re.compile(r'<a href="[^"]*/([^"/#]+)#sha256=([0-9a-f]{64})"')


class Pin(NamedTuple):
    version: str
    sha256: str  # of the file that pip took here


def resolve(requirements: list[str]) -> dict[str, Pin]:
    """Versions of what these bring along, those with markers of another system or Python among them."""
    requirements = [one.partition(";")[0] for one in requirements]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        arguments = ["--dry-run", "--ignore-installed", "--quiet", "--report", report.name, *requirements]
        subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)
        found = json.loads(Path(report.name).read_text())["install"]
    return {
        entry["metadata"]["name"].lower().replace("_", "-"): Pin(
            entry["metadata"]["version"], entry["download_info"]["archive_info"]["hashes"]["sha256"]
        )
        for entry in found
    }


def hashes(name: str, pin: Pin) -> list[str]:
    """The hashes of all files of this version. The one that pip took here must be one of them."""
    with urllib.request.urlopen(f"{INDEX}/{name}/") as reply:
        files = _FILE.findall(reply.read().decode())
    found = sorted({sha256 for file, sha256 in files if version_of(urllib.parse.unquote(file)) == pin.version})
    if pin.sha256 not in found:
        raise SystemExit(f"{name} {pin.version}: pip took a file here that {INDEX} does not have")
    return found


def version_of(file: str) -> str | None:
    try:
        return str((parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename)(file)[1])
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None  # of times long past


def write(path: Path, head: str, pins: dict[str, Pin], markers: dict[str, str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda item: hashes(*item), sorted(pins.items()))
    lines = (
        f"{name}=={pin.version}{markers.get(name, '')}{''.join(map(HASH.format, known))}\n"
        for (name, pin), known in zip(sorted(pins.items()), found, strict=True)
    )
    path.write_text(head + "".join(lines))


def markers_of(requirements: list[str]) -> dict[str, str]:
    """The markers behind requirements of our own that only some systems have. Those of others' are not kept."""
    split = (one.partition(";") for one in requirements)
    return {re.split(r"[=<>\[ ]", name)[0].lower(): f"; {marker.strip()}" for name, _, marker in split if marker}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    engine = [TORCH if one.startswith("torch") else one for one in extras["engine"]]
    runtime = [*project["project"]["dependencies"], *engine]
    dev = project["dependency-groups"]["dev"]
    image = [*project["project"]["dependencies"], *(one for name in IMAGE for one in extras[name])]
    everything = resolve([*runtime, *dev, *image])
    pinned = {name: everything[name] for name in resolve(runtime) if name != "torch"}
    tested = resolve([*runtime, *dev])
    rest = {name: everything[name] for name in tested if name not in pinned and name != "torch"}
    shipped = {name: everything[name] for name in resolve(image)}
    write(ROOT / "requirements.lock", "# The versions penstock is tested with. Written by tools/lock.py.\n", pinned, {})
    (ROOT / "requirements-torch.lock").write_text(
        f"# After requirements.lock; why by itself: tools/lock.py.\n{TORCH}\n"
    )
    write(
        ROOT / "requirements-image.lock",
        "# Packages of every container image; one with an engine has requirements.lock besides. No torch.\n",
        shipped,
        markers_of(image),
    )
    write(
        ROOT / "requirements-build.lock",
        "# Packages that build penstock's wheel for container images.\n",
        resolve(project["build-system"]["requires"]),
        {},
    )
    write(
        ROOT / "requirements-dev.lock",
        "# What tests and checks need besides, after requirements-torch.lock.\n-r requirements.lock\n",
        rest,
        markers_of(dev),
    )


if __name__ == "__main__":
    main()
