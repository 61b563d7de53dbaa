"""`make test-gpu` runs every test that needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

from tools.gpu_tests.__main__ import FILES, ROOT, parts


def test_every_file_with_a_test_for_a_gpu_is_run() -> None:
    words = re.compile(r'NEEDS_GPU|needs_cuda|GPU = pytest|reason="(needs a|no) GPU|triton_pair|ops\.triton import')
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if words.search(path.read_text())]
    missing = {str(path.relative_to(ROOT)) for path in tests} - FILES.keys() - {str(Path(__file__).relative_to(ROOT))}
    assert not missing


def test_parts_are_all_of_it_and_take_about_as_long() -> None:
    found = parts(2)
    assert sorted(found[0] + found[1]) == sorted(FILES)
    seconds = [sum(FILES[file] for file in part) for part in found]
    assert max(seconds) < 1.2 * min(seconds)
    assert all((ROOT / file).exists() for file in FILES)
