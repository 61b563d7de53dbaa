from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.search import MAX_TRIES, Search, Try, slo_edge, up_edge


def searched(search: Search, slo_limit: float, up_limit: float) -> list[Try]:
    """A server that keeps the SLO and keeps up exactly to these loads."""
    tries: list[Try] = []
    while (load := search.next_load(tries)) is not None:
        tries.append(Try(load, load <= slo_limit, load <= up_limit))
    return tries


@given(times=st.floats(0.02, 200), more=st.floats(1, 8), start=st.floats(0.5, 20), precision=st.floats(0.1, 0.5))
def test_both_edges_are_found_as_well_as_asked_and_the_answer_is_confirmed(
    times: float, more: float, start: float, precision: float
) -> None:
    slo = times * start
    tries = searched(Search(start, precision), slo, slo * more)
    found, failed = slo_edge(tries)
    assert len(tries) < MAX_TRIES
    assert found is not None
    assert failed is not None
    assert found <= slo < failed
    assert failed <= found * (1 + precision) * 1.02  # loads have three digits
    assert sum(one.load == found for one in tries) == 2
    saturated = up_edge(tries)
    assert saturated.passed is not None
    assert saturated.failed is not None
    assert saturated.passed <= slo * more < saturated.failed


@given(slo=st.integers(1, 500), more=st.integers(0, 500))
def test_clients_are_whole_and_found_to_the_last_one_where_precision_asks(slo: int, more: int) -> None:
    tries = searched(Search(1, 0.001, is_whole=True), slo, slo + more)
    assert all(one.load == int(one.load) for one in tries)
    assert slo_edge(tries).passed == slo or len(tries) == MAX_TRIES


def test_a_server_that_never_keeps_the_slo_is_given_up() -> None:
    tries = searched(Search(8), 0.0, 100.0)
    assert slo_edge(tries).passed is None
    assert len(tries) < 10


def test_a_load_that_fails_its_confirmation_is_not_the_answer() -> None:
    tries = searched(Search(1), 10.0, 30.0)
    found = slo_edge(tries).passed
    assert found is not None
    tries[-1] = Try(found, False, True)
    again = Search(1).next_load(tries)
    assert again is not None
    assert again < found


@given(times=st.floats(0.02, 200), more=st.floats(1, 8))
def test_the_number_of_loads_to_come_is_known_better_and_better(times: float, more: float) -> None:
    search = Search(2.0, 0.1)
    tries = searched(search, 2 * times, 2 * times * more)
    guesses = [number + len(search.expected_loads(tries[:number])) for number in range(len(tries) + 1)]
    assert guesses[-1] == guesses[-2] == len(tries)
    assert all(number < guess <= MAX_TRIES for number, guess in enumerate(guesses[:-1]))
