"""`make test-gpu` runs every test that needs a GPU."""

from __future__ import annotations

import re
from importlib.util import module_from_spec
from pathlib import Path

from tools.gpu_tests.__main__ import FILES, ROOT, parts
from tools.gpu_tests.plugin import WithoutAssertions


def test_every_file_with_a_test_for_a_gpu_is_run() -> None:
    words = re.compile(
        r'NEEDS_GPU|needs_cuda|GPU = pytest|reason="(needs a|no) GPU|triton\.pair|penstock\.model\.ops\.triton'
    )
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if words.search(path.read_text())]
    missing = {str(path.relative_to(ROOT)) for path in tests} - FILES.keys() - {str(Path(__file__).relative_to(ROOT))}
    assert not missing


def test_parts_are_all_of_it_and_take_about_as_long() -> None:
    found = parts(2)
    assert sorted(found[0] + found[1]) == sorted(FILES)
    seconds = [sum(FILES[file] for file in part) for part in found]
    assert max(seconds) < 1.2 * min(seconds)
    assert all((ROOT / file).exists() for file in FILES)


def test_in_the_compile_pass_what_is_asserted_is_computed_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "launching.py").write_text("seen = []\nassert seen.append(1), 'no'\nassert not seen.append(2)\n")
    spec = WithoutAssertions.find_spec("tests.launching", [str(tmp_path)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.seen == [1, 2]
    assert not (tmp_path / "__pycache__").exists()
    assert WithoutAssertions.find_spec("json") is None
