"""`penstock rollout` over a store, without a gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.cli.main import main
from penstock.tenancy.routes import Declared
from penstock.tenancy.store import Store, open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'penstock.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        opened.routes.declare([Declared("chat", {"v1": 90.0, "v2": 0.0, "v3": 10.0}, {})])
        yield opened


class Command:
    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys
        self.told = ""  # on standard error

    def __call__(self, *words: str) -> str:
        main([*words, "--store", self._url])
        said, self.told = self._capsys.readouterr()
        return said


@pytest.fixture
def command(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(url, capsys)


def test_start_status_story_and_orders_are_said_in_words(command: Command, store: Store) -> None:
    assert command("rollout", "status").startswith("no rollout is on")
    said = command("rollout", "start", "chat", "--to", "v2")
    (begun,) = store.rollouts.on()
    assert said == f"rollout {begun.id}: chat from v1 to v2: waiting\n"
    assert "1 of 6, shadow" in command("rollout", "status")
    assert "started: command rolls chat out from v1 to v2" in command("rollout", "story", "chat")
    assert command("rollout", "pause", "chat", "--reason", "lunch").endswith("waiting, pause ordered\n")
    assert command("rollout", "abort", begun.id).endswith("waiting, abort ordered\n")
    with pytest.raises(SystemExit, match="is being aborted"):
        command("rollout", "promote", "chat", "--all")


def test_everything_is_there_for_programs(command: Command) -> None:
    begun = json.loads(command("rollout", "start", "chat", "--to", "v2", "--from", "v3", "--json"))
    assert (begun["from"], begun["to"]) == ("v3", "v2")
    (found,) = json.loads(command("rollout", "status", "--json"))
    assert found["id"] == begun["id"]
    (entry,) = json.loads(command("rollout", "story", begun["id"], "--json"))
    assert (entry["what"], entry["phase"]) == ("started", "waiting")


def test_the_plan_that_is_printed_is_one_that_can_be_given(command: Command, store: Store, tmp_path: Path) -> None:
    changes = tmp_path / "plan.yaml"
    changes.write_text("hold_s: 7\ngates: {cost: {enabled: false}}\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text(command("rollout", "plan", "chat", "--plan", str(changes)))
    plan = yaml.safe_load(whole.read_text())
    assert (plan["hold_s"], plan["gates"]["cost"]["enabled"], len(plan["steps"])) == (7.0, False, 6)
    command("rollout", "start", "chat", "--to", "v2", "--plan", str(whole))
    assert json.loads(command("rollout", "status", "--json"))[0]["plan"]["hold_s"] == 7.0


def test_a_wrong_plan_is_refused_by_what_is_wrong(command: Command, tmp_path: Path) -> None:
    wrong = tmp_path / "plan.yaml"
    wrong.write_text("gates: {tpto: {margin: 1}}\n")
    with pytest.raises(SystemExit, match=r"tpto.*did you mean 'tpot'"):
        command("rollout", "start", "chat", "--to", "v2", "--plan", str(wrong))


def test_shares_changed_by_hand_say_that_a_rollout_is_on(command: Command) -> None:
    command("routes", "weights", "chat", "v3=20")
    assert command.told == ""
    command("rollout", "start", "chat", "--to", "v2")
    command("routes", "show", "chat")
    assert "of chat to v2 is on (waiting)" in command.told
    command("routes", "weights", "chat", "v3=10")
    assert "it pauses" in command.told


def test_a_model_whose_versions_are_pipelines_has_no_shadow_steps(
    store: Store, command: Command, tmp_path: Path
) -> None:
    store.routes.declare([Declared("flow", {"v1": 1.0, "v2": 0.0}, {}, has_copies=False)])
    plan = yaml.safe_load(command("rollout", "plan", "flow"))
    assert [step["shadow"] for step in plan["steps"]] == [None] * 5
    with_shadow = tmp_path / "plan.yaml"
    with_shadow.write_text("steps: [{shadow: 0.1}, {share: 1}]\n")
    with pytest.raises(SystemExit, match="not copied"):
        command("rollout", "start", "flow", "--to", "v2", "--plan", str(with_shadow))
