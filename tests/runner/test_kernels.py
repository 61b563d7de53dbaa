"""What becomes of weights of few bits on a CPU: kept where that is faster or asked for, and told as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.settings import EngineSettings
from penstock.model.ops import formats
from penstock.model.ops.build import KernelsUnavailable, build_kernels
from penstock.model.ops.formats import BATCH_WEIGHTS, Format
from penstock.model.ops.native import NativeOps
from penstock.quant import quant_of
from penstock.quant.mxfp4 import quantized
from penstock.runner.kernels import Kernels, choose_kernels
from tests.runner.small import CONFIG

CPU = torch.device("cpu")
WIDE, FOUR, EIGHT = Format("native", "float32"), *formats.LOW_BIT
Choose = Callable[..., Kernels]


def timed(candidate: Format, ms: float) -> Format:
    return replace(candidate, timings_ms=dict.fromkeys(map(str, BATCH_WEIGHTS), ms))


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Kernels for a model of 4 bits on a machine that was measured so."""
    try:
        build_kernels()
        NativeOps("float32", threads=1, keeps=frozenset({4, 8}))
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))

    def chosen(*measured: Format, stored: str | None = "int4", **settings: str) -> Kernels:
        monkeypatch.setattr(formats, "_measured", lambda *_: list(measured))
        config = replace(CONFIG, quantization=stored)  # type: ignore[arg-type]
        return choose_kernels(config, EngineSettings(threads=1, **settings), CPU)  # type: ignore[arg-type]

    return chosen


def kept(kernels: Kernels) -> list[int]:
    ops = kernels.make_ops()
    assert isinstance(ops, NativeOps)
    return sorted(ops.keeps)


def test_stored_bits_are_kept_where_that_is_faster(choose: Choose) -> None:
    found = choose(timed(WIDE, 4), timed(FOUR, 1), timed(EIGHT, 2))
    assert (found.quant, kept(found)) == ("int4", [4, 8])
    found = choose(timed(WIDE, 4), timed(FOUR, 1), timed(EIGHT, 9))
    assert (found.quant, kept(found)) == ("int4", [4])


def test_they_are_widened_where_it_is_not_and_nobody_is_told_otherwise(choose: Choose) -> None:
    found = choose(timed(WIDE, 1), timed(FOUR, 2), timed(EIGHT, 2))
    assert (found.quant, kept(found)) == ("none", [])
    found = choose(timed(WIDE, 1))  # no instruction for them
    assert (found.quant, kept(found)) == ("none", [])


def test_what_is_asked_for_is_kept_in_any_case(choose: Choose) -> None:
    slow = timed(WIDE, 1), timed(FOUR, 2), timed(EIGHT, 2)
    for quant, bits in (("int4", 4), ("int8", 8), ("w8a8", 8)):
        for stored in ("int4", None):
            found = choose(*slow, stored=stored, quant=quant)
            assert (found.quant, kept(found)) == (quant, [bits])
    found = choose(*slow, quant="int4", dtype="float32")
    assert (found.quant, kept(found)) == ("int4", [4])


def test_none_widens(choose: Choose) -> None:
    found = choose(timed(WIDE, 4), timed(FOUR, 1), timed(EIGHT, 1), quant="none")
    assert (found.quant, kept(found)) == ("none", [])


def test_float32_is_exact_unless_bits_are_asked_for(choose: Choose) -> None:
    found = choose(timed(WIDE, 4), timed(FOUR, 1), timed(EIGHT, 1), dtype="float32")
    assert (found.quant, kept(found)) == ("none", [])


def test_a_wish_that_the_processor_cannot_meet_is_refused(choose: Choose) -> None:
    with pytest.raises(ConfigError, match="no instruction for weights of 4 bits") as refused:
        choose(timed(WIDE, 1), quant="int4")
    assert refused.value.param == "quant"


def test_a_wish_without_a_compiler_is_refused(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="quant is int8, but no C compiler") as refused:
        choose(timed(WIDE, 1), quant="int8")
    assert refused.value.param == "quant"


def test_random_weights_are_made_what_the_model_would_have(choose: Choose) -> None:
    fast, weight = (timed(WIDE, 4), timed(FOUR, 1), timed(EIGHT, 2)), torch.randn(4, 128)
    assert choose(*fast).quantize(weight) is weight
    assert quant_of(choose(*fast, load="dummy").quantize(weight)) == "int4"


def test_without_native_kernels_one_line_says_why_and_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/false")
    found = choose_kernels(CONFIG, EngineSettings(threads=1, dtype="float32"), CPU)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert found.name == "torch"
    assert warnings == [
        "no native CPU kernels: the model runs on torch, several times slower: "
        "the C compiler /bin/false failed: it ended with status 1 and said nothing"
    ]


def test_experts_in_mxfp4_are_kept_wherever_there_are_kernels(choose: Choose, caplog: pytest.LogCaptureFixture) -> None:
    """Also where that is not faster: it is what makes such a model fit."""
    found = choose(timed(WIDE, 1), timed(FOUR, 4), timed(EIGHT, 9), stored="mxfp4")
    assert (found.quant, kept(found)) == ("mxfp4", [4])
    weight = quantized(torch.randn(4, 32))
    assert found.quantize(weight) is weight
    assert not caplog.records
    wide = choose(timed(WIDE, 1), stored="mxfp4", dtype="float32")
    assert (wide.quant, kept(wide)) == ("none", [])
    assert "experts are widened from MXFP4 to float32, which takes 0.0 GB instead of 0.0" in caplog.text
