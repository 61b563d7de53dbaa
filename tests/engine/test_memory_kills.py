from pathlib import Path

from penstock.engine.memory_kills import count_memory_kills


def test_kills_of_the_own_group_count_before_those_of_the_machine(tmp_path: Path) -> None:
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    machine.write_text("nr_free_pages 12\noom_kill 7\n")
    assert count_memory_kills((group, machine)) == 7
    group.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert count_memory_kills((group, machine)) == 2


def test_a_kernel_that_does_not_say_has_killed_nobody(tmp_path: Path) -> None:
    assert count_memory_kills((tmp_path / "nothing",)) == 0
