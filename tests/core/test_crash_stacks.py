from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
CRASH = """
import os, resource, signal
from penstock.core.crash_stacks import write_stacks_on_crash

def dies_here():
    os.kill(os.getpid(), signal.{})

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
write_stacks_on_crash()
dies_here()
"""
NOT_ITSELF = ["bench/own_gateway.py"]  # it becomes `penstock gateway`


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_process_that_a_signal_ends_leaves_its_stacks_in_its_log(name: str) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH.format(name)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.Signals[name]
    assert "in dies_here" in ended.stderr
    assert ended.stdout == ""


def test_a_process_without_standard_error_writes_stacks_into_no_file_that_has_its_descriptor(tmp_path: Path) -> None:
    found = tmp_path / "found"
    opening = f"file = open({str(found)!r}, 'w')\nassert file.fileno() == 2\n"
    script = CRASH.format("SIGSEGV").replace("\ndies_here()\n", f"\n{opening}dies_here()\n")
    ended = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, script], check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert found.read_text() == ""


def test_every_program_does_so() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    programs = {name: source for name, source in sources.items() if '__name__ == "__main__"' in source}
    assert "cli/main.py" in programs
    assert [name for name, source in programs.items() if "\n    write_stacks_on_crash()" not in source] == NOT_ITSELF
