"""Choosing by measurement: the verdict is kept, a trap costs one candidate, and no compiler means torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.model.ops import formats
from penstock.model.ops.build import KernelsUnavailable, build_kernels
from penstock.model.ops.formats import BATCH_WEIGHTS, Format, choose_format, fastest
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import ReferenceOps


def timed(arithmetic: str, *times_ms: float) -> Format:
    return Format("native", arithmetic, timings_ms=dict(zip(map(str, BATCH_WEIGHTS), times_ms, strict=True)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home, but for the kernels: they are compiled once."""
    try:
        library = build_kernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    (tmp_path / "kernels").mkdir()
    shutil.copy(library, tmp_path / "kernels")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def test_fastest_is_chosen_over_all_batch_sizes() -> None:
    slow, fast = timed("float32", 4, 4, 4, 4), timed("bfloat16", 2, 2, 5, 5)
    assert fastest([slow, fast]) is fast


def test_less_exact_format_must_be_worth_it() -> None:
    exact, hardly_faster = timed("bfloat16", 1, 1, 1, 1), timed("bfloat16_dot", 0.99, 0.99, 0.99, 0.99)
    assert fastest([exact, hardly_faster]) is exact


@pytest.mark.slow
def test_verdict_is_measured_once(home: Path) -> None:
    first = choose_format()
    (verdict,) = (home / "formats").iterdir()
    assert isinstance(first.ops(), NativeOps)
    assert set(first.timings_ms) == {str(m) for m in BATCH_WEIGHTS}

    kept = json.loads(verdict.read_text())
    only = next(fields for fields in kept if fields["arithmetic"] == "bfloat16")
    verdict.write_text(json.dumps([only]))
    assert choose_format("auto").arithmetic == "bfloat16"
    assert choose_format("bfloat16").arithmetic == "bfloat16"


def test_quantized_weights_are_kept_where_that_is_faster_and_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster, slower = timed("float32", 1, 1, 1, 1), timed("float32", 9, 9, 9, 9)
    measured = [timed("bfloat16", 2, 2, 2, 2), replace(faster, keeps=[4]), replace(slower, keeps=[8])]

    def asked(candidates: Sequence[Format], threads: int, library: Path | None) -> list[Format]:
        return [each for each in measured if each.keeps in [candidate.keeps for candidate in candidates]]

    monkeypatch.setattr(formats, "_measured", asked)
    chosen = choose_format(keep_low_bit=True)
    assert (chosen.arithmetic, chosen.keeps) == ("bfloat16", [4])
    assert choose_format("float32", keep_low_bit=True).keeps == []
    assert choose_format().keeps == []


def test_float32_is_given_without_measuring(home: Path) -> None:
    assert choose_format("float32") == Format("native", "float32")
    assert not (home / "formats").exists()


def test_without_a_compiler_torch_computes_and_the_reason_is_kept(no_compiler: None) -> None:
    chosen = choose_format("float32")
    assert isinstance(chosen.ops(), ReferenceOps)
    assert chosen.fallback_reason is not None
    assert "no C compiler" in chosen.fallback_reason


def test_trap_costs_the_candidate_that_trapped_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A python that dies of SIGILL the moment torch's own bfloat16 would run with AMX in sight."""
    stand_in = tmp_path / "python"
    lines = [
        f"#!{sys.executable}",
        "import json, os, signal, sys",
        "for fields in json.loads(sys.argv[4]):",
        "    if fields['arithmetic'] == 'bfloat16' and 'ONEDNN_MAX_CPU_ISA' not in os.environ:",
        f"        os.kill(os.getpid(), {int(signal.SIGILL)})",
        f"    fields['timings_ms'] = {{str(m): 1.0 for m in {list(BATCH_WEIGHTS)}}}",
        "    print(json.dumps(fields), flush=True)",
    ]
    stand_in.write_text("\n".join(lines))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    measured = list(formats._measure_in_children(formats.REFERENCE, threads=1))
    assert [(each.arithmetic, each.environment) for each in measured] == [
        ("float32", {}),
        ("bfloat16", formats.WITHOUT_AMX),
    ]
    assert measured[1].ops().weight_dtype is torch.bfloat16
    assert os.environ.pop("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_FP16"
