from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.stops import StopStrings

letters = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """What the whole text gives: the end that comes first, and of the stops that end there the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@given(st.lists(letters), stop_lists, st.booleans())
def test_pieces_give_what_cutting_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    stream = StopStrings(stops, include).scanner()
    results = [stream.push(piece) for piece in pieces]
    text = "".join(text for text, _ in results) + stream.flush()
    whole = "".join(pieces)
    assert (text, any(hit for _, hit in results)) == cut(whole, stops, include)
    if stream.hit is not None:
        assert stream.hit in stops
        assert whole.startswith(text if include else text + stream.hit)
    assert (stream.hit is not None) == any(hit for _, hit in results)


@given(st.lists(letters, min_size=1), stop_lists)
def test_only_the_beginning_of_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    stream = StopStrings(stops).scanner()
    sent = ""
    for piece in pieces:
        text, hit = stream.push(piece)
        if hit:
            return
        sent += text
    held = "".join(pieces)[len(sent) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert StopStrings(["abcd", "c"]).scanner().push("xabcd") == ("xab", True)
    stream = StopStrings(["\n\nUser:", ":"]).scanner()
    assert stream.push("yes\n\nUser: no") == ("yes", True)
    assert stream.hit == "\n\nUser:"


def test_an_included_stop_is_the_end_of_the_text() -> None:
    stream = StopStrings(["</s>"], include=True).scanner()
    assert stream.push("done</") == ("done", False)
    assert stream.push("s> more") == ("</s>", True)
    assert stream.flush() == ""


def test_nothing_comes_after_a_stop() -> None:
    stream = StopStrings(["."]).scanner()
    assert stream.push("One. Two") == ("One", True)
    assert stream.push("Three.") == ("", True)
    assert stream.flush() == ""


def test_without_stops_text_passes_untouched() -> None:
    stream = StopStrings([]).scanner()
    assert stream.push("anything") == ("anything", False)
    assert stream.flush() == ""


def test_choices_share_an_automaton_and_each_has_its_own_text() -> None:
    stops = StopStrings(["abc"])
    one, other = stops.scanner(), stops.scanner()
    assert one.push("xab") == ("x", False)
    assert other.push("c") == ("c", False)
    assert one.push("c") == ("", True)
    assert other.flush() == ""


def test_the_largest_stops_that_a_request_may_have_take_little_memory() -> None:
    """Beginnings of 16 stops of 1,024 characters are 8 MiB of text, and there may be hundreds of such requests."""
    wanted = ["a" * (1000 - index) + "b" * (24 + index) for index in range(16)]
    tracemalloc.start()
    try:
        stops = StopStrings(wanted)
        assert tracemalloc.get_traced_memory()[0] < 256 << 10
    finally:
        tracemalloc.stop()
    scanner = stops.scanner()
    assert scanner.push("a" * 5000 + "c") == ("a" * 5000 + "c", False)
    assert scanner.push("x" + wanted[7] + "y") == ("x", True)
    assert scanner.hit == wanted[7]
