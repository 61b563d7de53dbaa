"""Work beside requests outlives its errors, and a death is noticed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.observe import background
from penstock.observe.background import Worker, outliving
from penstock.observe.recurring import Recurring
from tests.waiting import eventually


class Ticking(Recurring):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__("ticking", 0.001)
        self.error = error
        self.num_ticks = 0

    def tick(self) -> None:
        self.num_ticks += 1
        if self.error is not None:
            raise self.error


def test_a_thread_goes_on_after_an_error_that_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    before = background.errors().get("ticking", 0)
    with Ticking(ValueError("what is this?")) as ticking:
        eventually(lambda: ticking.num_ticks, lambda ticks: ticks > 8)
        assert "ticking" not in background.dead()
    assert background.errors()["ticking"] - before == ticking.num_ticks
    assert "what is this?" in caplog.text
    assert caplog.text.count("ticking: unexpected error") < ticking.num_ticks  # a disk is not filled with it


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_told_until_it_is_stopped() -> None:
    ticking = Ticking(SystemExit()).start()
    eventually(lambda: background.dead(), lambda dead: "ticking" in dead)
    ticking.error = None
    ticking.close()
    assert "ticking" not in background.dead()


async def test_a_task_that_has_died_is_told_and_one_that_was_cancelled_is_not() -> None:
    async def fail() -> None:
        raise ValueError

    async def wait() -> None:
        await asyncio.Event().wait()

    failed, cancelled = asyncio.create_task(fail()), asyncio.create_task(wait())
    workers = [Worker.of_task("failing", failed), Worker.of_task("waiting", cancelled)]
    cancelled.cancel()
    await asyncio.wait([failed, cancelled])
    dead = background.dead()
    for worker in workers:
        worker.stop()
    assert "failing" in dead
    assert "waiting" not in dead
    assert isinstance(failed.exception(), ValueError)


def test_errors_of_several_threads_are_all_counted() -> None:
    def fail() -> None:
        for _ in range(200):
            with outliving("many threads"):
                raise ValueError

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert background.errors()["many threads"] == 800
