"""What an engine noted of its rehearsal: believed by the next one of the same kind, and not where it cannot be true."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.model.ranks import LoneRank, Ranks, SingleRank
from penstock.model.shard import Shard
from penstock.model.stages import Stage
from penstock.runner.load import load
from penstock.runner.rehearsal_note import RehearsalNote
from penstock.runner.size import rehearsal_note
from tests.runner.small import CONFIG

GIB = 1 << 30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))


@pytest.mark.usefixtures("home")
def test_a_note_is_read_by_the_next_engine_of_its_kind_alone() -> None:
    RehearsalNote.about("llama on an H200").write(3 * GIB, torch_bytes=2 * GIB)
    assert RehearsalNote.about("llama on an H200").read() == 3 * GIB
    assert RehearsalNote.about("llama on an A100").read() is None


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("taken", "torch_bytes"), [(1, 2), (20, 3)])
def test_nothing_is_noted_where_another_process_came_or_went_meanwhile(taken: int, torch_bytes: int) -> None:
    note = RehearsalNote.about("llama")
    note.write(taken * GIB, torch_bytes * GIB)
    assert note.read() is None


@pytest.mark.usefixtures("home")
def test_a_forgotten_or_broken_note_is_none() -> None:
    note = RehearsalNote.about("llama")
    note.write(3 * GIB, 3 * GIB)
    note.forget()
    note.forget()
    assert note.read() is None
    note.path.write_text("half a")
    assert note.read() is None


class Elsewhere:
    """The way to a stage that nobody asks for anything."""

    def send(self, x: torch.Tensor) -> None: ...

    def receive(self, num_rows: int) -> torch.Tensor:
        raise AssertionError("no step is run")


@pytest.mark.parametrize(
    ("ranks", "stage", "is_noted"),
    [
        (SingleRank(), Stage(), True),
        (LoneRank(Shard(0, 2)), Stage(), False),
        (SingleRank(), Stage(range(1), after=Elsewhere()), False),
        (SingleRank(), Stage(range(1, 2), before=Elsewhere()), False),
    ],
    ids=["alone", "tensor parallel", "first stage", "last stage"],
)
def test_a_rank_among_others_has_no_note(
    ranks: Ranks, stage: Stage, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They rehearse together: one that found a note would leave the others waiting for it."""
    gpu = SimpleNamespace(name="a GPU", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    settings = EngineSettings(device="cpu", dtype="float32")
    loaded = load(RandomCheckpoint(CONFIG), settings, lambda *_: None, ranks=ranks, stage=stage)
    assert (rehearsal_note(loaded, settings) is not None) == is_noted
