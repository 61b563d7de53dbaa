"""A gateway describes no type after its imports: msgspec would end the process where two threads meet one at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_type_of_the_store_or_of_rollouts_is_described_after_the_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gateway.rollouts.described", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, [], "")
