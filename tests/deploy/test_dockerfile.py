"""The Dockerfile, read without a builder. `python -m tools.dockerfile` runs its steps."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch

import pytest
import yaml
from tools.dockerfile import ROOT, Stage, copies, needed, stages
from tools.helm import CHART

STAGES = stages((ROOT / "Dockerfile").read_text())
IMAGES = ["edge", "cpu", "cuda"]
LOCKS = {path.name for path in ROOT.glob("requirements*.lock")} - {"requirements-dev.lock"}


def last(image: str, instruction: str) -> str:
    """The instruction that counts: the last one of the image, or of the image that it is made from."""
    stage: Stage | None = STAGES[image]
    while stage is not None:
        if found := stage.texts(instruction):
            return found[-1]
        stage = STAGES.get(stage.base)
    raise AssertionError(f"{image} has no {instruction}")


def test_what_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    assert lines[0] == "*"  # nothing but what is named
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for stage in STAGES.values():
        for origin, sources, _ in copies(stage):
            assert origin is None or origin in STAGES
            for source in sources if origin is None else ():
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source, pattern) for pattern in allowed), source


def test_packages_come_from_the_locks_alone_with_their_hashes() -> None:
    commands = [text for stage in STAGES.values() for text in stage.texts("RUN") if "pip" in text and "install" in text]
    used = {name: text for text in commands for name in re.findall(r"-r (\S+)", text)}
    assert set(used) == LOCKS
    for name, text in used.items():
        assert ("--require-hashes" in text) is (name != "requirements-torch.lock"), name  # why: tools/lock.py
    unlocked = [text for text in commands if "-r " not in text and "apt-get" not in text]
    assert all("--no-deps --no-index" in text for text in unlocked)  # penstock's own wheel


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_penstock_as_the_user_that_the_chart_names(image: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert last(image, "USER") == "{runAsUser}:{runAsGroup}".format(**values["podSecurityContext"])
    (program,) = json.loads(last(image, "ENTRYPOINT"))
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert last(image, "EXPOSE") == "8000 8001"
    assert last(image, "STOPSIGNAL") == "SIGTERM"


def test_only_images_with_an_engine_have_a_compiler_and_torch() -> None:
    def steps(image: str) -> str:
        return "\n".join(text for stage in needed(STAGES, image) for text in stage.texts("RUN"))

    assert {image for image in IMAGES if "gcc" in steps(image)} == {"cpu", "cuda"}
    assert {image for image in IMAGES if "requirements-torch.lock" in steps(image)} == {"cpu", "cuda"}
    tools = re.compile(r"\b(build-essential|git|curl|python3?-dev)\b")
    assert not any(tools.search(steps(image)) for image in IMAGES)


def test_the_chart_asks_for_targets_that_there_are() -> None:
    text = "".join(path.read_text() for path in CHART.glob("templates/**/*.*"))
    asked = re.findall(r'penstock\.image" \(list \S+ \S+ "(\w+)"', text) + re.findall(r'ternary "(\w+)" "cpu"', text)
    assert {*asked, "cpu"} == set(IMAGES)
