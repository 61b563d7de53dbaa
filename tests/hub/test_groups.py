from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.model_config import StoredGroups
from penstock.hub.groups import stored_groups
from penstock.hub.hf import HFCheckpoint
from tests.hub.integer_checkpoints import LAYOUTS, write_integers


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("GPTQ, symmetric", StoredGroups(32)),
        ("GPTQ, act-order", StoredGroups(32, is_ordered=True)),
        ("GPTQ, one group", None),  # a scale for each output: its inputs may be split anywhere
        ("W8A16", None),
        ("W8A8", None),
    ],
)
def test_groups_are_those_of_the_files(name: str, groups: StoredGroups | None, tmp_path: Path) -> None:
    write_integers(tmp_path, LAYOUTS[name])
    assert stored_groups(HFCheckpoint(tmp_path)) == groups
