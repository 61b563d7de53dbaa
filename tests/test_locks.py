"""The locks: every version with its hashes, so that `pip install --require-hashes` takes nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pins(name: str) -> dict[str, str]:
    """The text behind each package's version, by package."""
    entries = (ROOT / name).read_text().replace("\\\n", "").splitlines()
    named = (re.match(r"([a-z0-9.-]+)==([\w.]+)(.*)", line) for line in entries if not line.startswith(("#", "-r ")))
    return {found[1]: found[3] for found in named if found is not None}


LOCKS = ["requirements.lock", "requirements-dev.lock", "requirements-image.lock", "requirements-build.lock"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_the_hashes_of_its_files(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith(("#", "-r ", "    --hash"))]
    found = pins(name)
    assert len(found) == len(lines) > 4
    for package, rest in found.items():
        assert re.fullmatch(r"(; [^#]*?)?(\s+--hash=sha256:[0-9a-f]{64})+", rest.rstrip()), package


def versions(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9.-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE))


def test_images_have_the_versions_that_are_tested() -> None:
    tested = versions("requirements.lock") | versions("requirements-dev.lock")
    for package, version in versions("requirements-image.lock").items():
        assert tested.get(package, version) == version, package


def test_torch_alone_is_left_to_the_machine() -> None:
    """Its libraries depend on the build, and pip asks for the hashes of all or of none."""
    assert "torch" not in pins("requirements.lock") | pins("requirements-dev.lock")
    assert pins("requirements-torch.lock") == {"torch": ""}
