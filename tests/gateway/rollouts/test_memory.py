"""Which version answered which request, for users' feedback."""

from __future__ import annotations

from penstock.core.rollout import Arm
from penstock.gateway.rollouts.memory import AnswerMemory, Complaint


def test_a_word_finds_the_version_that_answered_and_the_last_word_counts() -> None:
    memory = AnswerMemory()
    memory.add("a", "r", Arm.NEW, "acme")
    assert memory.complain("a", "acme", 0.0) == Complaint("r", Arm.NEW, "acme", 1.0, None)
    assert memory.complain("a", "acme", 0.0) is None
    memory.count("a", 3)
    memory.count("of another gateway", 3)
    assert memory.complain("a", "acme", 0.75) == Complaint("r", Arm.NEW, "acme", 0.25, 1.0, counted_in=3)


def test_another_tenants_request_and_one_that_nobody_knows_are_the_same() -> None:
    memory = AnswerMemory()
    memory.add("a", "r", Arm.OLD, "acme")
    assert memory.complain("a", "rival", 0.0) is None
    assert memory.complain("b", "acme", 0.0) is None
    assert memory.complain("a", "acme", 1.0) == Complaint("r", Arm.OLD, "acme", 0.0, None)


def test_the_oldest_are_forgotten() -> None:
    memory = AnswerMemory(most=2)
    for name in ("a", "b", "c"):
        memory.add(name, "r", Arm.OLD, "acme")
    assert len(memory) == 2
    assert memory.complain("a", "acme", 0.0) is None
    assert memory.complain("c", "acme", 0.0) is not None
