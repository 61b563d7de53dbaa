"""Runs of a small suite whose files are handed out whole: what is reported is what pytest alone would report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.by_file import long_import
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
