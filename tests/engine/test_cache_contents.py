import hypothesis.strategies as st
from hypothesis import given

from penstock.engine.cache_contents import CacheContents

some = st.sets(st.integers(0, 30), max_size=8)


@given(st.lists(st.one_of(st.tuples(some, some, some), st.none()), max_size=30))
def test_a_reader_that_is_told_the_difference_now_and_then_has_the_set(
    script: list[tuple[set[int], set[int], set[int]] | None],
) -> None:
    """None: the reader looks."""
    contents = CacheContents()
    known: set[int] = set()
    known_on_host: set[int] = set()
    seq = contents.seq
    for change in [*script, None]:
        if change is not None:
            everything = contents.hashes.keys() | contents.on_host.keys()
            stored, removed = change[0] - contents.hashes.keys(), (change[1] - change[0]) & everything
            on_host = change[2] - change[0] - change[1] - contents.on_host.keys()
            contents.take(sorted(stored), sorted(removed), sorted(on_host))
            continue
        changes = contents.since(seq)
        assert changes is not None
        stored, removed, on_host = map(set, changes)
        assert len(stored | removed | on_host) == changes.size
        known = (known - removed - on_host) | stored
        known_on_host = (known_on_host - removed - stored) | on_host
        seq = contents.seq
        assert known == contents.hashes.keys()
        assert known_on_host == contents.on_host.keys()
        assert contents.since(seq) == ([], [], [])


def test_a_reader_far_behind_is_told_to_take_the_whole_set() -> None:
    contents = CacheContents()
    for start in range(0, 10_000, 10):
        contents.take(range(start, start + 10), range(start - 100, start - 90) if start >= 100 else ())
    assert len(contents.hashes) == 100
    assert contents.since(0) is None
    assert contents.since(contents.seq + 1) is None
    assert contents.since(contents.seq - 10) is not None


def test_another_process_begins_another_history() -> None:
    contents = CacheContents()
    contents.begin(256)
    contents.take([1, 2], [])
    boot = contents.boot
    contents.begin(512)
    assert contents.boot != boot
    assert (contents.size, contents.seq, contents.hashes) == (512, 0, {})
