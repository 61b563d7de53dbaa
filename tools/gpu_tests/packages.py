"""Packages that the GPU tests need beside torch, Triton and transformers, for a machine that can install nothing.

    make gpu-packages PYTHON_VERSION=3.12

fetches them, in the versions of `requirements-dev.lock`, into `.gpu-packages`. A checkout that is copied to the other
machine with that folder has them: `make test-gpu` looks there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys

from tools.gpu_tests.__main__ import PACKAGES as DIRECTORY
from tools.gpu_tests.__main__ import ROOT

# What these need is fetched too.
PACKAGES = (
    *("msgspec", "gguf", "llguidance", "httptools", "uvloop", "rich", "pillow", "pyyaml", "jinja2", "psutil"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
# What they need and such a machine has, with what depends on its torch.
THERE = ("numpy", "tqdm", "requests", "urllib3", "certifi", "charset_normalizer", "idna")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu-packages", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    arguments = parser.parse_args()
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(DIRECTORY)]
    command += ["--python-version", arguments.python, "--only-binary=:all:", *pinned()]
    if code := subprocess.call(command):
        return code
    for name in THERE:
        for found in DIRECTORY.glob(f"{name}*"):
            shutil.rmtree(found, ignore_errors=True)
    if shutil.which("strip"):  # symbols of extensions are half of what would have to travel
        subprocess.call(["strip", "--strip-unneeded", *map(str, DIRECTORY.rglob("*.so"))])
    size_bytes = sum(file.stat().st_size for file in DIRECTORY.rglob("*") if file.is_file())
    print(f"{DIRECTORY.name}: {size_bytes / 1e6:.0f} MB, for Python {arguments.python}")
    return 0


def pinned() -> list[str]:
    """The packages as the locks have them."""
    locks = "".join((ROOT / name).read_text() for name in ("requirements.lock", "requirements-dev.lock"))
    versions = dict(re.findall(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", locks, re.MULTILINE))
    return [f"{name}=={versions[name]}" for name in PACKAGES]


if __name__ == "__main__":
    sys.exit(main())
