"""vLLM's tests, out of its source distribution: fetched from the package index that pip is set to, and unpacked."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
_NAME = f"vllm-{VERSION}"


def fetched(directory: Path) -> Path:
    """The folder that holds vLLM's folder `tests`. pip itself would build the package to learn what it needs."""
    found = directory / _NAME
    if not (found / "tests").exists():
        directory.mkdir(parents=True, exist_ok=True)
        archive = directory / f"{_NAME}.tar.gz"
        archive.write_bytes(_download())
        with tarfile.open(archive) as packed:
            members = [one for one in packed if one.name.startswith(f"{_NAME}/tests/")]
            packed.extractall(directory, members, filter="data")
        archive.unlink()
    return found


def _download() -> bytes:
    page = f"{_index().rstrip('/')}/vllm/"
    with urllib.request.urlopen(page) as answer:
        links = re.findall(r'href="([^"]+)"', answer.read().decode())
    for link in links:
        if urllib.parse.urlparse(link).path.endswith(f"/{_NAME}.tar.gz"):
            with urllib.request.urlopen(urllib.parse.urljoin(page, link)) as answer:
                body: bytes = answer.read()
            if hashlib.sha256(body).hexdigest() != SHA256:
                raise SystemExit(f"{_NAME}.tar.gz is not the file that these tests were chosen from")
            return body
    raise SystemExit(f"the package index has no {_NAME}.tar.gz")


def _index() -> str:
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or asked or "https://pypi.org/simple"
