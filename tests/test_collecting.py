from __future__ import annotations

from pathlib import Path

import pytest

from tests.collecting import has_none_of, is_left_out

SOME = "@pytest.mark.slow\ndef test_it(): ..."
ALL = "pytestmark = pytest.mark.slow\n"
SEEDED = "from tests.seeded import seeded\n"
DRILLS = "pytestmark = [pytest.mark.slow, pytest.mark.drill]\n"


@pytest.mark.parametrize(
    ("text", "conftests", "markers", "expected"),
    [
        ("", "", "not slow", False),
        ("", "", "slow and not drill", True),
        ("", "", "drill", True),
        ("", "", "hypothesis", False),
        ("", "", "hypothesis and not slow", False),
        ("", "marks=pytest.mark.slow", "slow and not drill", False),
        ("", SEEDED, "not slow", True),
        ("", SEEDED, "slow and not drill", False),
        (SOME, SEEDED, "not slow", True),
        (DRILLS, SEEDED, "drill", False),
        (SOME, "", "not slow", False),
        (SOME, "", "slow and not drill", False),
        (ALL, "", "not slow", True),
        (ALL, "", "slow and not drill", False),
        (ALL, "", "drill", True),
        (DRILLS, "", "slow and not drill", True),
        (DRILLS, "", "drill", False),
    ],
)
def test_a_file_is_left_out_where_its_text_rules_all_of_its_tests_out(
    text: str, conftests: str, markers: str, expected: bool
) -> None:
    assert has_none_of(text, conftests, markers) is expected


def test_a_directory_is_left_out_with_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "test_one.py").write_text(DRILLS)
    (tmp_path / "below" / "test_two.py").write_text(ALL)
    (tmp_path / "below" / "helpers.py").write_text("")
    found = {markers: is_left_out(tmp_path, markers) for markers in ("", "not slow", "slow and not drill", "drill")}
    assert found == {"": False, "not slow": True, "slow and not drill": False, "drill": False}
    (tmp_path / "helpers").mkdir()
    assert not is_left_out(tmp_path / "helpers", "drill")
