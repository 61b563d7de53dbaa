from hypothesis import given
from hypothesis import strategies as st

from penstock.watch.history import HOUR_S, History


@given(st.lists(st.integers(0, 5), min_size=1, max_size=900), st.sampled_from([60.0, 300.0, 600.0]))
def test_what_was_added_within_a_window_is_known_to_a_pace(added: list[int], window_s: float) -> None:
    history = History(1, 0.0)
    for second, number in enumerate(added, 1):
        history.totals[0] += number
        history.tick(float(second))
    now = float(len(added))
    pace_s = 10.0 if window_s <= 600.0 else 60.0
    least = sum(added[max(0, len(added) - int(window_s)) :])
    most = sum(added[max(0, len(added) - int(window_s + pace_s)) :])
    assert least <= history.over(window_s, now)[0] <= most


def test_memory_is_the_same_after_a_month() -> None:
    history = History(2, 0.0)
    for minute in range(40 * 24 * 60):
        history.totals[0] += 1
        history.tick(60.0 * minute)
    sizes = [len(pace.times) for pace in history._paces]
    assert sizes == [62, 362, 722]
    now = 60.0 * (40 * 24 * 60 - 1)
    assert history.over(HOUR_S, now)[0] in range(60, 63)
    assert history.over(30 * 24 * HOUR_S, now)[0] in range(30 * 1440, 30 * 1440 + 121)
