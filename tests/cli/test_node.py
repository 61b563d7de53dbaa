"""The command on a node without a server: whose secret it has."""

from __future__ import annotations

import os

import pytest

from penstock.cli.node import share_ranks_secret
from penstock.runner.ranks.gathering import secret_of


def test_nodes_know_the_replicas_secret_wherever_it_was_given_unless_there_is_one_for_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_RANKS_SECRET", "")
    share_ranks_secret(None)
    assert os.environ["PENSTOCK_RANKS_SECRET"] == ""
    share_ranks_secret("by a flag")
    assert secret_of(os.environ) == b"by a flag"
    share_ranks_secret("another")
    assert secret_of(os.environ) == b"by a flag"
