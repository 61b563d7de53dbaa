"""Replicas as processes: capacity that an operator has closed, and notices for what is there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.core.errors import CapacityRefused, ConfigError
from penstock.fleet.drivers.local import LocalDriver, cordon, uncordon
from penstock.fleet.drivers.process import Child
from penstock.fleet.policy.observation import CapacityType
from tests.fleet.drivers.contract import *  # noqa: F403
from tests.fleet.drivers.contract import spec


class FakeChild:
    pid = 0
    returncode = 0


async def fake_spawn(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
    new_session: bool,
    outlives: bool,
) -> Child:
    return FakeChild()


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[LocalDriver]:
    found = LocalDriver(tmp_path / "replicas", "secret", spawn=fake_spawn)
    yield found
    await found.close()


async def test_nothing_is_started_where_an_operator_has_cordoned(tmp_path: Path) -> None:
    driver = LocalDriver(tmp_path / "one" / "replicas", "secret", spawn=fake_spawn)
    assert cordon(tmp_path, "west") == []
    cordon(tmp_path, "spot")
    for refused in (spec("a", "west"), spec("b", "east", CapacityType.SPOT)):
        with pytest.raises(CapacityRefused, match="cordoned"):
            await driver.start(refused)
    await driver.start(spec("c", "east"))
    uncordon(tmp_path, "west")
    await driver.start(spec("a", "west"))
    assert [(one.id, one.zone) for one in await driver.list()] == [("a", "west"), ("c", "east")]


async def test_replicas_of_a_drained_zone_get_notices(tmp_path: Path) -> None:
    driver = LocalDriver(tmp_path / "one" / "replicas", "secret", spawn=fake_spawn)
    for name, zone in (("a", "west"), ("b", "east"), ("c", "west")):
        await driver.start(spec(name, zone))
    assert sorted(cordon(tmp_path, "west", drained_in_s=100.0)) == ["a", "c"]
    assert [one.id for one in await driver.list() if one.deadline_s is not None] == ["a", "c"]


@pytest.mark.parametrize("name", ["", "../replicas", "a/b"])
def test_a_cordon_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        cordon(tmp_path, name)
