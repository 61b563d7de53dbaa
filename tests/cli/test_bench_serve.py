from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.servers import started
from penstock.cli.main import parser

FAKE = [sys.executable, "-m", "tests.bench.fake_server", "token_s=0.002"]
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


def run(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PENSTOCK, *words], capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_of_the_manual_works_as_a_user_types_it(tmp_path: Path) -> None:
    out, html = tmp_path / "out.json", tmp_path / "out.html"
    with started("fake", FAKE) as fake:
        words = ["bench", "serve", "--url", fake.url, "--model", "fake", "--concurrency", "4", "--requests", "16"]
        done = run(*words, "--json", str(out), "--html", str(html), "--api-key", "sk-secret", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "| concurrency 4 | TTFT" in done.stdout
    assert "16/16" in done.stderr
    report = json.loads(out.read_text())
    (point,) = report["points"]
    assert (point["num_requests"], point["num_answers"], point["output_tokens"]) == (16, 16, 16 * 128)
    assert (report["seed"], len(point["requests"])) == ("3", 16)
    assert point["ttft"]["p50"] > 0.002
    assert html.read_text().startswith("<!doctype html>")
    assert "sk-secret" not in done.stdout + done.stderr + out.read_text() + html.read_text()


@pytest.mark.slow
def test_nothing_is_measured_where_the_report_cannot_be_written(tmp_path: Path) -> None:
    done = run("bench", "serve", "--url", "http://127.0.0.1:9", "--json", str(tmp_path / "gone" / "o.json"))
    assert done.returncode == 1
    assert "there is no directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ["--concurrency", "0"],
        ["--concurrency", "4,x"],
        ["--rate", "-1"],
        ["--rate", "nan"],
        ["--body", "[1]"],
        ["--body", "{"],
        ["--arrivals", "never"],
        ["--trace", "a", "--prompts", "b"],
        ["--requests", "1.5"],
    ],
)
def test_what_cannot_be_asked_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "serve", "--url", "http://h", *wrong])
    assert wrong[0] in capsys.readouterr().err


def test_a_closed_and_an_open_loop_are_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli.main import main

    with pytest.raises(SystemExit, match="closed loop"):
        main(["bench", "serve", "--url", "http://h", "--rate", "1", "--concurrency", "2"])
    with pytest.raises(SystemExit, match="is not an objective"):
        main(["bench", "serve", "--url", "http://h", "--slo", "fast"])
    with pytest.raises(SystemExit, match="not a length"):
        main(["bench", "serve", "--url", "http://h", "--prompt-tokens", "long"])
