"""`penstock pipeline check`: files by themselves, and those of a gateway's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

STEPS = 'name: {}\nsteps: {{answer: {{model: smollm2, prompt: "{{{{ input.text }}}}"}}}}\n'


def check(*words: object) -> None:
    main(["pipeline", "check", *map(str, words)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a gateway, with a pipeline in a folder beside it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "one.yaml").write_text(STEPS.format("one"))
    (tmp_path / "two.yaml").write_text(STEPS.format("two"))
    path = tmp_path / "gateway.yaml"
    path.write_text("models:\n  smollm2: {replicas: [http://127.0.0.1:9]}\npipelines: [own/one.yaml]\n")
    return path


def test_a_gateways_pipelines_are_checked_wherever_it_is_asked_from(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check("--config", config, tmp_path / "two.yaml", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["models"], one["output"]) for one in found] == [
        ("two", ["smollm2"], "text"),
        ("one", ["smollm2"], "text"),
    ]
    check("--config", config, tmp_path / "own" / "one.yaml")
    assert capsys.readouterr().out.count("can be served") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (STEPS.format("one").replace("smollm2", "smolm2"), "one.yaml:2: step 'answer': there is no model 'smolm2'"),
        (STEPS.format("smollm2"), "one.yaml:1: 'smollm2' is the name of a model or an alias already"),
        ("name: one\nsteps: {answer: {templte: x}}\n", "one.yaml:2: step 'answer': it says nothing of what to run"),
    ],
)
def test_an_error_says_where(config: Path, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "own" / "one.yaml").write_text(text)
    with pytest.raises(SystemExit) as wrong:
        check("--config", config)
    assert problem in str(wrong.value)


def test_there_must_be_something_to_check(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to check"):
        check()
    with pytest.raises(SystemExit, match=r"cannot read .*missing\.yaml"):
        check(tmp_path / "missing.yaml")
