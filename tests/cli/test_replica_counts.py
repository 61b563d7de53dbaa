import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli import serve_command
from penstock.cli.replica_counts import ReplicaCounts, check_counts, replica_counts
from penstock.cli.replicas import _write_config, with_transfer
from penstock.cli.serve_fleet import _fleet
from penstock.core.errors import ConfigError
from penstock.core.settings import Settings
from tests.model.family_configs import SHAPE


def test_replicas_are_a_number_a_range_or_roles() -> None:
    assert replica_counts("2") == ReplicaCounts(2, 2)
    assert replica_counts("2").each_role == ("both", "both")
    assert replica_counts("0..4") == ReplicaCounts(0, 4)
    assert replica_counts("prefill=1,decode=2") == ReplicaCounts(3, 3, ("prefill", "decode", "decode"))
    assert str(replica_counts("prefill=1,decode=2")) == "3 replicas (1 prefill, 2 decode)"
    assert replica_counts("both=2").each_role == ("both", "both")
    assert not replica_counts("both=2").is_range


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "neither a number"),
        ("4..1", "neither a number"),
        ("many", "neither a number"),
        ("prefill=2", "no replica that answers"),
        ("decode=0", "no replica that answers"),
        ("decode=1,decode=2", "ROLE=N"),
        ("encode=1", "both, prefill, decode"),
        ("decode=1..2", "a range has no roles"),
        ("decode=-1", "ROLE=N"),
        ("decode=1,2", "ROLE=N"),
    ],
)
def test_anything_else_is_refused_with_what_would_work(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        replica_counts(text)


def test_several_replicas_share_neither_a_role_nor_a_port() -> None:
    settings, two = Settings("m"), replica_counts("2")
    check_counts(settings, two)
    for wrong, param in (
        (replace(settings, server=replace(settings.server, role="prefill")), "role"),
        (replace(settings, engine=replace(settings.engine, kv_port=9000)), "kv_port"),
    ):
        check_counts(wrong, replica_counts("1"))
        with pytest.raises(ConfigError) as raised:
            check_counts(wrong, two)
        assert raised.value.param == param


def test_each_replica_of_this_machine_has_its_role_and_a_kv_port_that_it_picks(tmp_path: Path) -> None:
    written = json.loads(_write_config(Settings("m"), "m", 9001, "prefill", 2, tmp_path).read_bytes())
    assert (written["server"]["role"], written["engine"]["kv_port"]) == ("prefill", 0)
    files: Any = SimpleNamespace(config=SHAPE)
    (pool,) = _fleet(with_transfer(Settings("m"), files), "serve", 1, 4).pools.values()
    assert pool["engine"]["kv_port"] == 0


@pytest.mark.parametrize("replicas", ["1", "1..2"])
def test_a_prompt_is_shared_only_where_there_is_another_replica(replicas: str) -> None:
    parser = argparse.ArgumentParser()
    serve_command.add_flags(parser)
    assert parser.parse_args(["m"]).split == "auto"
    with pytest.raises(ConfigError, match="nobody to share a prompt with"):
        serve_command.run(parser.parse_args(["m", "--replicas", replicas, "--split", "always"]))
