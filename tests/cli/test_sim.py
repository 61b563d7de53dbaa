"""`penstock sim` as a user calls it."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

TRACE = str(Path(__file__).parents[1] / "router" / "data" / "mooncake_conversation_1200.jsonl.xz")


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "sim.html", tmp_path / "sim.json"
    asked = ["compare", TRACE, "--count", "60", "--replicas", "2", "--strategy", "kv_aware,oracle"]
    crowd = ["--tenants", "3", "--classes", "interactive=1,standard=1"]
    main(["sim", *asked, *crowd, "--html", str(page), "--json", str(figures)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["kv_aware", "oracle"]
    assert [row["answered"] for row in json.loads(figures.read_text())] == [60, 60]
    assert page.read_text().count("<svg") == 3
    assert "http" not in page.read_text()


def test_weights_are_the_routers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sim", "run", TRACE, "--count", "20", "--replicas", "2", "--weights", "prefix=3,load.queue=2", "--markdown"])
    assert capsys.readouterr().out.startswith("| replicas | policy |")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy", "fastest"], "no policy 'fastest'"),
        (["--weights", "prefx=3"], "did you mean 'weights.prefix'"),
        (["--weights", "prefix"], "NAME=NUMBER"),
        (["--profile", "h100"], "no profile 'h100'"),
        (["--replicas", "0"], "--replicas is N"),
        (["--classes", "gold=1"], "no class 'gold'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sim", "run", TRACE, "--count", "5", *flags])
    assert said in str(stopped.value)


def test_fleet_compares_autoscaling_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "out.html", tmp_path / "out.json"
    asked = ["fleet", "steady", "--days", "0.005", "--peak", "60", "--policy", "static,oracle"]
    main(["sim", *asked, "--html", str(page), "--json", str(figures)])
    told = capsys.readouterr().out
    assert told.splitlines()[0].startswith("policy")
    assert "static" in told
    assert "Replicas by state" in page.read_text()
    results = json.loads(figures.read_text())
    assert [each["policy"] for each in results] == ["static", "oracle"]
    assert results[0]["in_slo"] > 0.99


@pytest.mark.parametrize("flags", [["nothing"], ["steady", "--policy", "nobody"]])
def test_fleet_refuses_what_it_does_not_know(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["sim", "fleet", *flags])
    assert "there are" in str(stopped.value)
