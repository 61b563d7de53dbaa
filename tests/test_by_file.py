"""Runs of a small suite whose files are handed out whole: what is reported is what pytest alone would report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.by_file import FEW_FILES, FileScheduling, long_import
from tests.reporting import REPORT

ROOT = Path(__file__).parent.parent
CONFTEST = """
import pytest
from tests.reporting import Reporter

def pytest_configure(config):
    config.pluginmanager.register(Reporter())
"""
NOTES = """
import pytest

@pytest.fixture(scope="package", autouse=True)
def noted():
    with open("notes", "a") as notes:
        print("begin", __name__, file=notes)
    yield
    with open("notes", "a") as notes:
        print("end", __name__, file=notes)
"""
FILES = {
    "conftest.py": CONFTEST,
    "pytest.ini": "[pytest]\nmarkers = slow\n",
    "first/__init__.py": "",
    "first/conftest.py": NOTES,
    "first/test_a.py": "import pytest\ndef test_one(): ...\n@pytest.mark.slow\ndef test_two(): ...\n",
    "first/test_b.py": "import pytest\n@pytest.mark.slow\ndef test_three(): ...\n",
    "second/__init__.py": "",
    "second/conftest.py": NOTES,
    "second/test_c.py": "import pytest\ndef test_four():\n    assert 2 == 3\ndef test_five(): pytest.skip('why')\n",
    "second/test_d.py": "import nothing_of_this_name\n",
    "second/test_e.py": "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_six(n): ...\n",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(suite: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, REPORT: str(suite / "report.json"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.by_file", "--maxschedchunk", "1", *arguments]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((suite / "report.json").read_text())
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "markers", "passed", "failed"),
    [
        ("2", "not slow", ["first/test_a.py", "second/test_e.py"], ["second/test_c.py::test_four", "second/test_d.py"]),
        ("1", "slow", ["first/test_a.py", "first/test_b.py"], ["second/test_d.py"]),
    ],
)
def test_tests_are_selected_run_and_reported_one_by_one(
    suite: Path, workers: str, markers: str, passed: list[str], failed: list[str]
) -> None:
    report = run(suite, "-n", workers, "-m", markers)
    assert sorted(report["failed"]) == failed
    assert report["passed"] == (3 if markers == "not slow" else 2)
    assert report["skipped"] == ({"why": 1} if markers == "not slow" else {})
    assert set(report["cpu_seconds"]) == {*passed, *(name.partition("::")[0] for name in failed if "::" in name)}


@pytest.mark.slow
def test_what_a_package_shares_is_made_once_by_a_worker_and_torn_down(suite: Path) -> None:
    """Also where the last file of a package has no test to run."""
    run(suite, "-n", "1", "-m", "not slow")
    notes = (suite / "notes").read_text().split("\n")
    assert notes == [f"{what} {where}.conftest" for where in ("first", "second") for what in ("begin", "end")] + [""]


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("import torch\n", "torch"),
        ("from tests.quant.runs import Runs\n", "torch"),
        ("import json\nfrom anthropic import Anthropic\n", "anthropic"),
        ("# torches\nfrom penstock.api.anthropic import events\n", None),
    ],
)
def test_what_takes_long_to_import_is_known_by_a_files_text(text: str, needed: str | None, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(text)
    assert long_import(tmp_path / "test_one.py") == needed


def test_what_a_conftest_imports_before_each_test_is_needed_by_all_files_below(tmp_path: Path) -> None:
    (tmp_path / "model" / "ops").mkdir(parents=True)
    for directory in (tmp_path / "model", tmp_path / "model" / "ops", tmp_path):
        (directory / "__init__.py").write_text("")
        (directory / "test_one.py").write_text("")
    (tmp_path / "model" / "conftest.py").write_text("from tests.seeded import seeded\n")
    assert long_import(tmp_path / "model" / "ops" / "test_one.py") == "torch"
    assert long_import(tmp_path / "model" / "test_one.py") == "torch"
    assert long_import(tmp_path / "test_one.py") is None


class Worker:
    """A worker as the scheduler sees it."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(workers: Sequence[Worker], texts: list[str], markers: str, directory: Path) -> FileScheduling:
    """Files with these texts, as they are handed out at first."""
    files = [f"test_{number}.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        (directory / file).write_text(text)
    options = {"maxschedchunk": 1, "tx": [f"{len(workers)}*popen"]}
    config = SimpleNamespace(
        rootpath=directory, option=SimpleNamespace(markexpr=markers), getoption=options.get, getvalue=options.get
    )
    scheduler = FileScheduling(cast(pytest.Config, config))
    for worker in workers:
        scheduler.add_node(cast(Any, worker))
        scheduler.add_node_collection(cast(Any, worker), files)
    scheduler.schedule()
    return scheduler


def test_two_workers_begin_with_files_that_need_torch_and_one_with_the_rest(tmp_path: Path) -> None:
    workers = [Worker() for _ in range(4)]
    texts = ["import torch\n", "", "import anthropic\n"] * 6
    scheduled(workers, texts, "not slow", tmp_path)
    assert [[texts[index] for index in worker.given] for worker in workers] == [
        [text] * 2 for text in ("import torch\n", "import anthropic\n", "import torch\n", "")
    ]


def test_nobody_waits_for_what_comes_next_where_there_are_as_many_files_as_workers(tmp_path: Path) -> None:
    """A worker begins when it knows what comes next, or that nothing does."""
    workers = [Worker(), Worker()]
    scheduler = scheduled(workers, ["import torch\n"] * 2, "not slow", tmp_path)
    assert [worker.given for worker in workers] == [[0], [1]]
    assert not scheduler.pending
    assert all(worker.shutting_down for worker in workers)


@pytest.mark.parametrize(
    ("num_alike", "markers", "is_taken"),
    [(4, "not slow", False), (FEW_FILES, "not slow", False), (FEW_FILES + 2, "not slow", True), (4, "slow", True)],
)
def test_few_fast_files_that_need_torch_are_left_to_the_worker_that_has_it(
    num_alike: int, markers: str, is_taken: bool, tmp_path: Path
) -> None:
    """The other worker runs two of three files that need nothing, and then nothing but those is left."""
    with_torch, other = workers = Worker(), Worker()
    scheduler = scheduled(workers, ["import torch\n"] * num_alike + [""] * 3, markers, tmp_path)
    assert with_torch.given == [0, 1]
    assert other.given == [num_alike, num_alike + 1]
    for index in other.given[:2]:
        scheduler.mark_test_complete(cast(Any, other), index)
    assert other.given[3:] == ([2] if is_taken else [])
    assert other.shutting_down is not is_taken
    while scheduler.node2pending[cast(Any, with_torch)]:
        scheduler.mark_test_complete(cast(Any, with_torch), scheduler.node2pending[cast(Any, with_torch)][0])
    assert not scheduler.pending
    assert sorted(with_torch.given + other.given) == list(range(num_alike + 3))
