"""What the event loop says and a thread writes."""

from __future__ import annotations

import threading

from penstock.observe.backlog import Backlog
from tests.waiting import GIVE_UP_S


class Numbers(Backlog[int]):
    def __init__(self, most: int = 1000, batch: int = 10) -> None:
        super().__init__("numbers", most=most, batch=batch)
        self.written: list[list[int]] = []
        self.is_full = False
        self.was_written = threading.Event()

    def write(self, batch: list[int]) -> None:
        if self.is_full:
            raise OSError("no space left on device")
        self.written.append(batch)
        self.was_written.set()


def test_everything_is_written_in_order_in_batches_by_another_thread() -> None:
    with Numbers() as numbers:
        for number in range(25):
            numbers.put(number)
        assert numbers.was_written.wait(GIVE_UP_S)
    assert [number for batch in numbers.written for number in batch] == list(range(25))
    assert max(map(len, numbers.written)) <= 10
    assert numbers.num_lost == 0


def test_what_comes_too_fast_is_lost_and_counted_and_the_rest_is_not() -> None:
    numbers = Numbers(most=30)
    for number in range(100):
        numbers.put(number)
    assert numbers.num_lost == 70
    numbers.start().close()
    assert [number for batch in numbers.written for number in batch] == list(range(30))


def test_what_cannot_be_written_is_lost_and_counted_and_what_can_be_again_is_written() -> None:
    numbers = Numbers()
    numbers.is_full = True
    for number in range(15):
        numbers.put(number)
    numbers.start().close()
    assert (numbers.num_lost, numbers.written) == (15, [])
    numbers.is_full = False
    numbers.put(99)
    numbers.tick()
    assert (numbers.num_lost, numbers.written) == (15, [[99]])


class Words(Backlog[object]):
    """What is no number cannot be put into words, and spoils its batch."""

    def __init__(self) -> None:
        super().__init__("words", most=100, batch=10)
        self.written: list[object] = []

    def write(self, batch: list[object]) -> None:
        words = [f"{one:d}" for one in batch]  # type: ignore[str-format]
        self.written += words


def test_one_that_cannot_be_put_into_words_is_lost_alone_and_counted() -> None:
    words = Words()
    with words:
        for one in (1, 2, "three", 4, 5):
            words.put(one)
    assert (words.written, words.num_lost) == (["1", "2", "4", "5"], 1)
