"""`penstock sim` as a user calls it."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

pytestmark = pytest.mark.slow

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


def test_a_replica_of_several_ranks_is_predicted_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, figures = tmp_path / "tp4.yaml", tmp_path / "sim.json"
    main(["sim", "predict", "llama70b", "--gpu", "h200", "--tp", "2", "--pp", "2", "--out", str(profile)])
    assert "not measured: llama70b" in profile.read_text()
    asked = ["run", TRACE, "--count", "20", "--replicas", "2", "--profile", str(profile)]
    main(["sim", *asked, "--json", str(figures)])
    (row,) = json.loads(figures.read_text())
    assert row["answered"] == 20
    assert row["device_hours"] == pytest.approx(8 * row["seconds"] / 3600)
    with pytest.raises(SystemExit) as left:
        main(["sim", "fleet", "steady", "--days", "0.01", "--profile", str(profile)])
    assert "is a pipeline" in str(left.value.code)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("llama70b --gpu h200", "does not fit on 1 x h200"),
        ("llama70b --gpu h201", "did you mean 'h200'"),
        ("llama70b --gpu h200 --tp 3", "cannot be split"),
        ("llama8b --gpu h200 --tp 2 --link sli", "no link 'sli'"),
        ("llama8b --gpu a100 --quant fp8", "no fp8 there"),
        ("llama8b --gpu h200 --per-node 0", "0 GPUs on 1 nodes"),
    ],
)
def test_a_replica_that_cannot_be_predicted_is_told_why(flags: str, said: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["sim", "predict", *flags.split()])
    assert said in str(left.value.code)


def test_fleets_with_roles_stand_beside_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "sim.json"
    fleets = "2,prefill=1,decode=1,prefill=1,both=1"
    main(["sim", "run", TRACE, "--count", "20", "--replicas", fleets, "--kv-gb-s", "12.5", "--json", str(figures)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["2", "prefill=1,decode=1", "prefill=1,both=1"]
    assert [row["answered"] for row in json.loads(figures.read_text())] == [20, 20, 20]


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
        (["--replicas", "prefill=2"], "has no replica that answers"),
        (["--replicas", "1..4"], "not a range"),
        (["--replicas", "prefill=1,decode=1", "--strategy", "oracle"], "the oracle knows no roles"),
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


def test_rollouts_with_a_regression_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "rollouts.json"
    main(["sim", "rollout", "--planted", "errors+50%", "--runs", "1", "--rate", "5", "--json", str(figures), "--story"])
    assert "aborting: step 1, shadow 5 %: errors" in capsys.readouterr().out
    assert [row["phase"] for row in json.loads(figures.read_text())] == ["aborted"]
    with pytest.raises(SystemExit) as left:
        main(["sim", "rollout", "--planted", "tpot"])
    assert "nothing to plant named 'tpot'" in str(left.value.code)
