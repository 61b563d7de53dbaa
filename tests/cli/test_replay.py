"""`penstock replay`, as typed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import msgspec
import pytest

from penstock.cli.main import main
from penstock.gateway.records.decisions import LENGTH, MAGIC
from tests.replay.past import traffic


@pytest.fixture
def log(tmp_path: Path) -> Path:
    block = zlib.compress(msgspec.msgpack.encode(list(traffic("kv_aware", 80))))
    path = tmp_path / "gateway-8000.log"
    path.write_bytes(MAGIC + LENGTH.pack(len(block)) + block)
    return path


def test_a_log_is_put_to_every_strategy(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", str(log)])
    shown = capsys.readouterr().out
    assert "80 requests for m" in shown
    assert "\nround_robin " in shown
    main(["replay", str(log), "--weights", "prefix=3", "--alone"])
    assert "kv_aware, weighted so" in capsys.readouterr().out


def test_a_policy_and_its_weights_are_compared_with_what_was_done(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["replay", str(log), "--policy", "kv_aware", "--weights", "prefix=0,load.queue=0,output=1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["others"]["kv_aware"]["agreement"] < 1
    assert told["others"]["kv_aware"]["reused_tokens"] < told["recorded"]["reused_tokens"]
    main(["replay", str(log), "--policy", "kv_aware,round_robin", "--json"])
    assert list(json.loads(capsys.readouterr().out)["others"]) == ["kv_aware", "round_robin"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "round_robbin"], "'round_robbin' is no strategy: did you mean round_robin?"),
        (["--weights", "prefx=2"], "unknown setting 'weights.prefx'; did you mean 'weights.prefix'?"),
        (["--weights", "queue=-1"], "setting 'weights.load.queue'"),
        (["--model", "other"], "has no choice of a replica for 'other'"),
    ],
)
def test_what_cannot_be_is_said(log: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(log), *words])
    assert complaint in str(ended.value)


def test_a_file_that_is_not_there_is_named_with_those_that_are(log: Path) -> None:
    with pytest.raises(SystemExit, match=r"gateway-1\.log is no decision log; there are gateway-8000\.log"):
        main(["replay", str(log.with_name("gateway-1.log"))])
    log.write_bytes(b"something else")
    with pytest.raises(SystemExit, match="no decision log of this version"):
        main(["replay", str(log)])


def test_a_weight_is_a_number(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(log), "--weights", "prefix"])
    assert "'prefix' is not NAME=NUMBER" in capsys.readouterr().err
