from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.bench import serve_arguments
from penstock.cli.flags import settings_from
from penstock.cli.main import main, parser


def test_the_server_to_measure_is_started_with_the_defaults_of_any_user_but_guesses_nothing() -> None:
    theirs = settings_from(parser().parse_args(["serve", "smollm2", "--port", "0", "--speculate", "off"]))
    assert settings_from(parser().parse_args(serve_arguments("smollm2"))) == theirs


def test_a_peer_is_given_by_name_and_url() -> None:
    arguments = parser().parse_args(["bench", "cpu", "--url", "a=http://h:1", "--url", "b=http://h:2/v1?x=y"])
    assert arguments.urls == [("a", "http://h:1"), ("b", "http://h:2/v1?x=y")]


@pytest.mark.parametrize("wrong", [["--url", "http://h:1"], ["--url", "a=h:1"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "cpu", *wrong])
    assert wrong[1] in capsys.readouterr().err


def test_a_document_without_markers_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("nothing to write between")
    with pytest.raises(SystemExit, match="bench:cpu"):
        main(["bench", "cpu", "--write", str(document)])
